"""Verbs on stores, heads and data: check (with repair), extract, export and regenerate. Everything heavy is imported when a verb is called."""

from pathlib import Path
from typing import Annotated, Literal

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

    from kimi_eagle import chat, paths
    from kimi_eagle.extract import spread

    values = values_of(file)
    stage = (paths.outputs() / (name or file.stem) / "02_extract_hidden_states").absolute()
    answers, states = stage / "answers.jsonl", stage / "states"
    if bool(shard) == bool(ray):
        raise BadInput("extract: give either --shard i/n or --ray N.")
    chat.read_answers(answers)  # a run without them is said before an engine loads
    if ray:
        from kimi_eagle.extract.configure import on_cpu

        gpus = 0 if on_cpu() else values["tensor_parallel"]
        held = spread.with_ray(partial(spread.opened, values), answers, states, ray, gpus)
    else:
        part, parts = spread.shard_of(shard)
        held = spread.extract_part(*spread.opened(values), answers, states, part, parts)
    print(f"{held} rows are stored")


@app.command()
def regenerate(
    files: Annotated[
        list[Path], typer.Argument(metavar="[DATA] OUT", help="prompts or conversations; .jsonl to write")
    ],
    target_name: Annotated[str, typer.Option("--target", help="who answers; default: the parameter file's")] = "",
    server: Annotated[str, typer.Option(help="its running server, http://host:port/v1; default: an engine here")] = "",
    params: Annotated[Path | None, typer.Option(help="parameter file, for the engine and what is not given")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer; default: answer_tokens")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="default: the parameter")] = None,
    seed: Annotated[int | None, typer.Option(help="default: the parameter")] = None,
    reasoning: Annotated[Literal["keep", "drop"], typer.Option(help="keep it in its field, or drop it")] = "keep",
    limit: Annotated[int, typer.Option(min=0, help="rows to take from DATA's start; 0: all")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="requests to a server at once")] = 32,
    count: Annotated[int, typer.Option("--invent", min=0, help="no DATA: let the target make up so many prompts")] = 0,
    distinct: Annotated[float, typer.Option(help="least share of distinct bigrams in an invented prompt")] = 0.5,
) -> None:
    """Let the target answer prompts and conversations itself, turn by turn, or make up the prompts; run it again to go on."""
    from kimi_eagle import conversations
    from kimi_eagle import regenerate as module
    from kimi_eagle.target import describe

    *data, out = files
    if len(data) != (0 if count else 1):
        raise BadInput("regenerate: give DATA and OUT, or --invent N and OUT alone.")
    if not (target_name or params):
        raise BadInput("regenerate: give --target, or --params with one.")
    values = values_of(params)
    rows = conversations.read(data[0], limit) if data else []
    target = describe(target_name or values["target"])
    given = {"answer_tokens": max_tokens, "temperature": temperature, "seed": seed}
    values |= {name: value for name, value in given.items() if value is not None}
    more = {"distinct": distinct} if count else {"reasoning": reasoning}
    settings = {"target": target.identity(), **{name: values[name] for name in given}, **more}
    module.kept(out, settings)  # another's file is refused before anything loads
    if server:
        from kimi_eagle.server import Server

        found = Server(server, target)
        source = module.Source(found.generate, found.limit, 1, concurrency)
    else:
        from types import SimpleNamespace

        from kimi_eagle.extract import session

        engine = session.open_engine(SimpleNamespace(**values), target, "plain")
        longest = target.text_config.get("max_position_embeddings") or values["max_model_len"]
        source = module.Source(engine.generate, min(longest, values["max_model_len"]), module.GROUP, 1)
    if count:
        held, dropped = module.invent(target, count, out, source, settings)
        print(f"{held} prompts in {out.name}", *(f"dropped, {why}: {n}" for why, n in dropped.items()), sep="\n")
        bad = held < count
    else:
        failed = module.regenerate(target, rows, out, source, settings)
        print(f"{len(rows) - len(failed)} of {len(rows)} rows are answered in {out.name}")
        for name, why in list(failed.items())[:3]:
            print(f"failed, {name}: {why}")
        bad = len(failed) == len(rows) or len(failed) > max(1, module.FAILED_LIMIT * len(rows))
    if bad:
        print(
            "too few: " + ("run with other settings." if count else f"{out.stem}.failed.jsonl says why; run it again.")
        )
        raise typer.Exit(1)


def values_of(file: Path | None) -> dict:
    """All parameters of all notebooks: those of `file`, defaults for the rest."""
    from kimi_eagle.notebook import parameters

    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(file), known, file.name) if file else {}
    return {name: given.get(name, parameter.default) for name, parameter in known.items()}
