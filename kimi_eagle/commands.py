"""Verbs on stores and heads: check (with repair), extract and export. Everything heavy is imported when a verb is called."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
Reader = Annotated[str, typer.Option("--for", help="who is to load a head: vllm, sglang or speculators")]


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="a hidden-state store, a head, or a run")],
    target_name: Annotated[str, typer.Option("--target", help="also hold a head against this target")] = "",
    reader: Reader = "vllm",
    repair: Annotated[
        bool, typer.Option(help="first take what is damaged out of a store; extraction then redoes exactly those rows")
    ] = False,
) -> None:
    """Hold a store, a head or a run against what its readers expect; one sentence per fault, exit code 1 if any."""
    from kimi_eagle import check as module

    if repair:
        from kimi_eagle.hidden_store import repair as repair_store

        print(*repair_store(path), sep="\n")
    kind, faults = module.check(path, target_name, reader)
    print("\n".join(faults) if faults else module.sound(kind, path, target_name, reader))
    if faults:
        raise typer.Exit(1)


@app.command()
def export(
    head: Annotated[Path, typer.Argument(help="a head's folder, in any format that check knows")],
    out: Annotated[Path, typer.Argument(help="folder to write; replaced as a whole")],
    target_name: Annotated[str, typer.Option("--target", help="the head's target")],
    reader: Reader = "vllm",
) -> None:
    """Write a head for another reader: its tensor names, its config and its convention of layer ids."""
    from kimi_eagle import check as module
    from kimi_eagle.eagle3 import checkpoint
    from kimi_eagle.target import describe

    checkpoint.convert(head, out, describe(target_name), reader)
    print(module.sound("head", out, target_name, reader))


def values_of(file: Path | None) -> dict:
    """All parameters of all notebooks: those of `file`, defaults for the rest."""
    from kimi_eagle.notebook import parameters

    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(file), known, file.name) if file else {}
    return {name: given.get(name, parameter.default) for name, parameter in known.items()}
