"""Verbs on stores and heads: check (with repair), extract and export. Everything heavy is imported when a verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from kimi_eagle.errors import BadInput

app = typer.Typer()
Reader = Annotated[str, typer.Option("--for", help="who is to load a head: vllm, sglang or speculators")]


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="a hidden-state store, a head, or a run")],
    target_name: Annotated[str, typer.Option("--target", help="also hold a store or a head against this target")] = "",
    reader: Reader = "vllm",
    repair: Annotated[
        bool, typer.Option(help="first take what is damaged out of a store; extraction then redoes exactly those rows")
    ] = False,
    canary: Annotated[Path | None, typer.Option(help="parameter file: hold a store's canary to its engine")] = None,
) -> None:
    """Hold a store, a head or a run against what its readers expect; one sentence per fault, exit code 1 if any."""
    from kimi_eagle import check as module

    if repair:
        from kimi_eagle.hidden_store import repair as repair_store

        print(*repair_store(path), sep="\n")
    kind, faults = module.check(path, target_name, reader, values_of(canary) if canary else None)
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


@app.command()
def extract(
    file: Annotated[Path, typer.Argument(help="parameter file of a run whose prompts are answered")],
    name: Annotated[str, typer.Option(help="the run's name; default: the parameter file's")] = "",
    shard: Annotated[str, typer.Option(help="i/n: this job's part of n, from 0; the run's folder is shared")] = "",
    ray: Annotated[int, typer.Option(help="engines to start as Ray actors, spread over the cluster")] = 0,
) -> None:
    """Extract states outside the notebook, in parts; `kimi-eagle run FILE --from 02` then reads them as one and goes on."""
    from functools import partial

    from kimi_eagle import paths
    from kimi_eagle.extract import spread

    values = values_of(file)
    stage = (paths.outputs() / (name or file.stem) / "02_extract_hidden_states").absolute()
    answers, states = stage / "answers.jsonl", stage / "states"
    if bool(shard) == bool(ray):
        raise BadInput("extract: give either --shard i/n or --ray N.")
    if ray:
        from kimi_eagle.extract.configure import on_cpu

        gpus = 0 if on_cpu() else values["tensor_parallel"]
        held = spread.with_ray(partial(spread.opened, values), answers, states, ray, gpus)
    else:
        part, parts = spread.shard_of(shard)
        held = spread.extract_part(*spread.opened(values), answers, states, part, parts)
    print(f"{held} rows are stored")


def values_of(file: Path | None) -> dict:
    """All parameters of all notebooks: those of `file`, defaults for the rest."""
    from kimi_eagle.notebook import parameters

    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(file), known, file.name) if file else {}
    return {name: given.get(name, parameter.default) for name, parameter in known.items()}
