"""The command `kimi-eagle`. Every verb imports what it needs when it is called: help, params and estimate answer at once.

Exit codes: 0 done, 1 a stage failed, 2 bad input, 3 a capability is missing here; one sentence on standard error says why.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from kimi_eagle.errors import BadInput, KimiEagleError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
engine_app = typer.Typer(no_args_is_help=True, help="The engines that stay up between cells and notebooks.")
app.add_typer(engine_app, name="engine")

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
VllmOption = Annotated[
    Path | None, typer.Option("--vllm", help="a vLLM wheel or site-packages folder; default: the installed one")
]
SpeculatorsOption = Annotated[
    Path | None, typer.Option("--speculators", help="a speculators wheel or folder; default: the installed one")
]


@app.callback()
def options(debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False) -> None:
    """From an AllReduce profile to a served EAGLE-3 head, in six notebooks."""
    if debug:
        os.environ["KIMI_EAGLE_DEBUG"] = "1"


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(help="parameter file; default: the small CPU model")] = None,
    quick: Annotated[bool, typer.Option(help="leave out what imports vLLM or starts an engine")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has and lacks, and what to do about it; exit code 3 where something is not OK."""
    from kimi_eagle.diagnose import examine, rows

    found = examine.examine(_values(file), quick=quick)
    print(json.dumps([vars(row) for row in found], indent=1) if as_json else rows.text(found))
    if any(row.state == rows.BAD for row in found):
        raise typer.Exit(3)


@app.command()
def params(
    stage: Annotated[str, typer.Argument(help="a notebook's number or name; default: all")] = "",
    as_json: AsJson = False,
) -> None:
    """List every parameter with its default, meaning and unit, as the notebooks declare them."""
    from kimi_eagle.notebook import parameters, plan

    names = [plan.find_stage(stage, parameters.stages())] if stage else None
    known = parameters.declared_everywhere(names).values()
    if as_json:
        print(json.dumps([vars(p) for p in known], indent=1))
        return
    for p in known:
        print(f"{p.name:<26} {json.dumps(p.default):<18} {p.meaning}  [{', '.join(s[:2] for s in p.notebooks)}]")


@app.command()
def run(
    files: Annotated[list[Path], typer.Argument(help="parameter files; several make a sweep")],
    start: Annotated[str, typer.Option("--from", help="redo from this notebook on")] = "",
    only: Annotated[str, typer.Option("--only", help="redo this notebook alone")] = "",
    name: Annotated[str, typer.Option("--name", help="name of the run; default: the file's stem")] = "",
) -> None:
    """Run the notebooks with a parameter file, and print where the report is.

    Finished stages of equal parameters are kept. Of several files each is run, whatever happens to the others.
    """
    from kimi_eagle.notebook import plan, runner

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends notebooks and engines
    if len(files) == 1:
        index = runner.run(plan.make(files[0], start, only, name))
        print(f"report: {runner.shown(index)}")
        return
    if name:
        raise BadInput("--name is for one parameter file; several take their own names.")
    raise typer.Exit(runner.run_many(files, start, only))


@app.command()
def report(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="a run's name, or its folder")],
    as_zip: Annotated[bool, typer.Option("--zip", help="also pack pages, notebooks, results and logs")] = False,
) -> None:
    """Write a run's index.html and merged result.json again, without running anything."""
    from kimi_eagle.notebook import report as module
    from kimi_eagle.notebook import runner

    folder = _run_folder(run_name)
    print(f"report: {runner.shown(module.rewrite(folder))}")
    if as_zip:
        print(f"zip: {runner.shown(module.bundle(folder))}")


@app.command()
def target(
    name: Annotated[str, typer.Argument(help="smollm2, tiny-kimi, a checkpoint folder, or a Hub name")],
    as_json: AsJson = False,
) -> None:
    """Describe a target checkpoint; smollm2 and tiny-kimi are made in the cache folder the first time."""
    from kimi_eagle.target import describe

    found = describe(name)
    facts = {
        "path": str(found.path),
        "architecture": found.architecture,
        "layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "vocab_size": found.vocab_size,
        "tied_embeddings": found.tied,
        "attention": "MLA" if found.is_mla else "multi-head",
        "quantization": found.quantization,
        **{part: found.tensor_name(part) for part in ("embed_tokens", "norm", "lm_head")},
    }
    print(json.dumps(facts, indent=1) if as_json else "\n".join(f"{key:<16} {value}" for key, value in facts.items()))


@app.command()
def estimate(file: Annotated[Path, typer.Argument(help="parameter file")], as_json: AsJson = False) -> None:
    """Say what a run will take, before anything is loaded; exit code 2 where the disk is too small."""
    from kimi_eagle import estimate as module

    figures = module.estimate(_values(file))
    print(json.dumps(figures, indent=1) if as_json else module.text(figures))
    if not figures["fits"]:
        raise typer.Exit(2)


@app.command()
def rehearse(
    file: Annotated[Path, typer.Argument(help="parameter file")],
    keep: Annotated[bool, typer.Option(help="leave the rehearsal's folder in outputs/")] = False,
) -> None:
    """Walk a run's real configuration through extraction, training, export and serving in minutes, before the long load.

    A few layers at full width with made-up weights, real tokenizer, back end and ranks. Stops at the first thing that breaks.
    """
    import shutil

    from kimi_eagle.notebook import preflight

    preflight.check(values := _values(file))  # in a second, before what follows imports torch
    from kimi_eagle import paths
    from kimi_eagle import rehearse as module

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = paths.outputs() / f"{file.stem}.rehearsal"
    try:
        seconds = module.rehearse(values, folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"rehearsal of {file.name}: nothing breaks, {sum(seconds.values()) / 60:.1f} min")


@app.command()
def locate(
    architecture: Annotated[
        str, typer.Argument(help="architecture or class, e.g. KimiK25ForConditionalGeneration")
    ] = "",
    vllm: VllmOption = None,
    family: Annotated[str, typer.Option(help="list the model files of a family, e.g. deepseek")] = "",
) -> None:
    """Find the class that serves a model in vLLM's files, and what of EAGLE-3 it lacks; vLLM is not imported."""
    from kimi_eagle import compat as module

    print(module.locate_text(architecture or None, vllm, family or None))


@app.command()
def compat(
    as_json: AsJson = False,
    vllm: VllmOption = None,
    speculators: SpeculatorsOption = None,
    old: Annotated[
        str, typer.Option("--from", help="before an upgrade: INSTALLED, or a wheel or folder")
    ] = "INSTALLED",
    new: Annotated[Path | None, typer.Option("--to", help="before an upgrade: the wheel or folder to go to")] = None,
) -> None:
    """One row per patch: needed or not, applied or refused; exit code 3 where no back end can work or a needed patch does not fit.

    With --to: which patches fall away, which symbols moved, and what heads the other release reads.
    """
    if new:
        from kimi_eagle.compat import upgrade
        from kimi_eagle.extract import backends

        found = upgrade.compare(None if old == "INSTALLED" else old, new)
        found["backends"] = backends.foretold(found["to"])
        print(json.dumps(found, indent=1) if as_json else upgrade.upgrade_text(found))
        return
    from kimi_eagle import compat as module
    from kimi_eagle.extract import backends

    found = module.compat_rows(vllm, speculators)
    release = module.release(vllm)
    able = backends.foretold(release) if release else []
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        chosen = [f"on GPUs, {r['target']}: back end {r['backend']}: {r['reason']}" for r in able]
        print(module.rows_text(found), *chosen, sep="\n")
        print("" if release else "no vLLM here: install one (README, 'Which environment'), or name one with --vllm.")
    if not able or any(r["backend"] == "none" for r in able) or any(r["state"] == "refused" for r in found):
        raise typer.Exit(3)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="a hidden-state store, a head, or a run")],
    target_name: Annotated[str, typer.Option("--target", help="also hold a store or a head against this target")] = "",
    reader: Annotated[str, typer.Option("--for", help="who is to load a head: vllm or sglang")] = "vllm",
    canary: Annotated[Path | None, typer.Option(help="parameter file: hold a store's canary to its engine")] = None,
) -> None:
    """Hold a store, a head or a run against what its readers expect; one sentence per fault, exit code 1 if any."""
    from kimi_eagle import check as module

    kind, faults = module.check(path, target_name, reader, _values(canary) if canary else None)
    print("\n".join(faults) if faults else module.sound(kind, path, target_name, reader))
    if faults:
        raise typer.Exit(1)


@engine_app.command("list")
def engine_list(as_json: AsJson = False) -> None:
    """Show the running engines."""
    from kimi_eagle.extract import engine

    found = engine.running()
    if as_json:
        print(json.dumps([vars(r) for r in found], indent=1))
        return
    for r in found:
        print(
            f"{r.key}  {r.role:<12} {Path(r.target).name:<16} {r.status:<8} up {r.age_s:.0f} s, idle {r.idle_s:.0f} s{'  stays' if r.stay else ''}"
        )
    if not found:
        print("no engine is running")


@engine_app.command("down")
def engine_down(
    keys: Annotated[list[str] | None, typer.Argument(help="keys from `engine list`; default: all")] = None,
) -> None:
    """End running engines and wait until their processes are gone."""
    from kimi_eagle import paths
    from kimi_eagle.extract import engine

    running = [r.key for r in engine.running()]
    unknown = sorted(set(keys or []) - set(running))
    if unknown:
        raise BadInput(f"engine {unknown[0]}: not running; `kimi-eagle engine list` shows those that are.")
    for key in keys or running:
        engine.end(paths.engines() / key)
        print(f"{key}: ended")


def main() -> None:
    """Entry point: the errors of the project become one sentence and their exit code."""
    try:
        app()
    except KimiEagleError as error:
        if os.environ.get("KIMI_EAGLE_DEBUG"):
            raise
        print(f"kimi-eagle: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _values(file: Path | None) -> dict:
    """All parameters of all notebooks: those of `file`, defaults for the rest."""
    from kimi_eagle.notebook import parameters

    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(file), known, file.name) if file else {}
    return {name: given.get(name, parameter.default) for name, parameter in known.items()}


def _run_folder(name: str) -> Path:
    from kimi_eagle import paths

    for folder in (paths.outputs() / name, Path(name)):
        if folder.is_dir():
            return folder.absolute()
    raise BadInput(f"run {name!r}: no such folder in outputs/; `kimi-eagle run` makes one.")


if __name__ == "__main__":
    main()
