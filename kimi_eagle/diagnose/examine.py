"""All of the diagnosis at once, for `kimi-eagle doctor`; notebook 00 asks for the parts one by one."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kimi_eagle.diagnose import machine, probes, serving
from kimi_eagle.diagnose.rows import BAD, Row
from kimi_eagle.errors import KimiEagleError


def surroundings(*, quick: bool = False) -> list[Row]:
    """The machine and its software. quick: without the probes that import torch and vLLM (about 30 s)."""
    if quick:
        return machine.versions() + machine.room()
    with ThreadPoolExecutor() as pool:  # the threads only wait for child processes
        torch, vllm = pool.map(probes.ask, ("torch", "vllm"))
    rows = machine.versions() + machine.cuda(torch) + machine.topology(torch) + machine.room()
    return rows + machine.platform(vllm)


def examine(values: dict[str, Any], *, quick: bool = False) -> list[Row]:
    """Every row for the parameters `values`. An error of one part becomes a row, so that the others are still seen."""
    rows = surroundings(quick=quick) + serving.engines()
    try:
        target, row = serving.target_row(values["target"])
        rows += [row, *serving.patches(), *serving.where_defined(target)]
        if not quick:
            rows += serving.backends(target, dtype=values["dtype"], tensor_parallel=values["tensor_parallel"])
            rows += serving.known_answer(
                target,
                values["known_answer"],
                dtype=values["dtype"],
                tensor_parallel=values["tensor_parallel"],
                port=values["engine_port"],
            )
    except KimiEagleError as error:
        rows.append(Row("target", BAD, str(error).splitlines()[0], "see above"))
    return rows
