"""The row that every diagnosis returns, and how rows are shown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

OK, BAD, NOTE = "OK", "NOT OK", "note"


@dataclass(frozen=True)
class Row:
    """One finding. state: OK, NOT OK, or note (neither good nor bad); to_do: what helps, "" where nothing is needed."""

    what: str
    state: str
    found: str
    to_do: str = ""


def frame(rows: list[Row]) -> "pd.DataFrame":
    """The rows as a table; long texts are shown in full."""
    import pandas as pd

    pd.set_option("display.max_colwidth", None)
    columns = ["what", "state", "found", "to_do"]
    return (
        pd.DataFrame([vars(row) for row in rows], columns=columns).rename(columns={"to_do": "to do"}).set_index("what")
    )


def text(rows: list[Row]) -> str:
    """The rows as lines of a terminal."""
    width = max((len(row.what) for row in rows), default=0)
    lines = [
        f"{row.state:<7} {row.what:<{width}}  {row.found}" + (f"\n{'':8}-> {row.to_do}" if row.to_do else "")
        for row in rows
    ]
    return "\n".join(lines)


def bad(rows: list[Row]) -> list[Row]:
    """The rows that are not OK."""
    return [row for row in rows if row.state == BAD]


def counts(rows: list[Row]) -> dict[str, int]:
    """How many rows are OK, not OK and notes: the figures of notebook 00."""
    return {
        name: sum(row.state == state for row in rows) for name, state in (("ok", OK), ("not_ok", BAD), ("notes", NOTE))
    }
