"""`kimi-eagle rehearse`: a run's real configuration, tokenizer, back end and ranks through every step in minutes, before the long load.

The target is a copy of a few layers at full width: its own config and tokenizer, embedding, final norm and lm_head of random
values on disk, everything else made up by vLLM (`load_format="dummy"`). States mean nothing then and are not verified; what a
rehearsal finds is what cannot load, capture, train, export or be served here.
"""

import copy
import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kimi_eagle import chat, conversations, paths, turns, vocab_map
from kimi_eagle import target as targets
from kimi_eagle.errors import BadInput, KimiEagleError, MissingCapability, StageFailed
from kimi_eagle.target import SUFFIXES, Target

LAYERS = 8  # the fewest in which 2, N/2 and N-3 are three different layers, with one to spare before the last
ROWS = 24
ANSWER_TOKENS = 24
STEPS = 10  # optimizer steps
SERVED_TOKENS = 16


def rehearse(values: dict[str, Any], folder: Path, tell: Callable[[str], None] = print) -> dict[str, float]:
    """Every step of the run with parameters `values` (all notebooks', defaults included); seconds per step.

    Raises the failing step's own error, its name in front; `folder` is emptied first and holds what was made.
    """
    from kimi_eagle.extract import configure
    from kimi_eagle.notebook import preflight

    preflight.check(values)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cfg = SimpleNamespace(**{**values, "engine_stay": False, "idle_minutes": 10, "engine_port": 0})
    steps = _Steps(tell)
    with steps("patches") as say:
        say(_patches())
    with steps("target") as say:
        full = _files(cfg.target)
        configure.engine_config(
            full, "extract", tensor_parallel=cfg.tensor_parallel
        )  # before anything large is written
        short = short_copy(full, folder / "target", cfg.dtype)
        say(
            f"{short.architecture}, {short.num_layers} layers at full width {short.hidden_size}, quantization {short.quantization}"
        )
    with steps("tokenizer") as say:
        rows = _rows(short, cfg)
        say(f"{len(rows)} conversations rendered, the longest {max(len(r.token_ids) for r in rows)} tokens")
    stores = _extract(short, cfg, rows, folder, steps)
    with steps("vocabulary map") as say:
        map_file = _map(short, cfg, stores["train"], folder)
        say(f"draft vocabulary of {len(vocab_map.load(map_file).d2t)}")
    with steps("training") as say:
        trained = _train(short, cfg, stores, map_file, folder)
        say(f"{trained.steps} steps; head exported for vLLM, attention {cfg.head_attention}")
    with steps("serving") as say:
        say(_serve(short, cfg, trained.head, rows))
    return steps.seconds


def short_copy(full: Target, folder: Path, dtype: str, layers: int = LAYERS) -> Target:
    """`full` cut to `layers` decoder layers: config and tokenizer its own, the three outer tensors random, no other weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for file in full.path.iterdir():
        if (
            file.is_file()
            and file.suffix != ".safetensors"
            and not file.name.endswith((".index.json", ".bin", ".gguf"))
        ):
            (folder / file.name).symlink_to(file.resolve())
    config, count = copy.deepcopy(full.config), full.num_layers
    text = targets.text_config(config)
    text["num_hidden_layers"] = kept = min(layers, count)
    for key, value in text.items():  # per-layer lists, such as layer_types
        if isinstance(value, list) and len(value) == count:
            text[key] = value[:kept]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    random = torch.Generator().manual_seed(0)
    shape = (full.vocab_size, full.hidden_size)
    tensors = {_name(full, "norm"): torch.ones(full.hidden_size, dtype=getattr(torch, dtype))}
    for part in ("embed_tokens",) if full.tied else ("embed_tokens", "lm_head"):
        tensors[_name(full, part)] = (torch.randn(shape, generator=random) * 0.02).to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return targets.describe(folder)


def _extract(short: Target, cfg: Any, rows: list[chat.Answer], folder: Path, steps: "_Steps") -> dict[str, Path]:
    from kimi_eagle.extract import loop, session
    from kimi_eagle.hidden_store import Store

    with steps("back end") as say:
        plan = loop.plan(short, [], backend=cfg.extract_backend, dtype=cfg.dtype, tensor_parallel=cfg.tensor_parallel)
        say(f"{plan.backend}: {plan.reason}")
    with steps("engine for states") as say:
        options = {"load_format": "dummy", **plan.engine_options}
        engine = session.open_engine(cfg, short, "extract", **options)
        say(f"vLLM {engine.call('describe')['vllm']}, tensor parallel {cfg.tensor_parallel}")
    try:
        with steps("extraction") as say:
            stores = {}
            for split in ("train", "heldout"):
                part = [r for r in rows if r.split == split]
                store = loop.extract(plan, engine, part, folder / "states" / split)
                if faults := store.check() or (
                    [] if len(store) == len(part) else [f"{len(store)} of {len(part)} rows came out"]
                ):
                    raise StageFailed(faults[0])
                stores[split] = store.folder
            say(f"states of layers {plan.layer_ids}, {Store(stores['train']).tokens} tokens to train on")
    finally:
        engine.down()
    return stores


def _map(short: Target, cfg: Any, store: Path, folder: Path) -> Path:
    from kimi_eagle.hidden_store import Store

    counted = vocab_map.count_tokens(Store(store), short.vocab_size)
    return vocab_map.for_target(counted, short, cfg.draft_vocab_size).save(folder / "map")


def _train(short: Target, cfg: Any, stores: dict[str, Path], map_file: Path, folder: Path) -> Any:
    from kimi_eagle.eagle3 import contract
    from kimi_eagle.hidden_store import Store
    from kimi_eagle.train import train
    from kimi_eagle.training.settings import for_stage

    # Rows short enough that the few tokens here make about STEPS steps of one epoch.
    tokens = Store(stores["train"]).tokens
    row_tokens = max(16, min(cfg.row_tokens, tokens // (STEPS * cfg.batch_rows * cfg.train_processes)))
    own = {
        "target": str(short.path),
        "row_tokens": row_tokens,
        "epochs": 1,
        "initial_weights": "random",
        "initial_head": "",
        "evaluation_samples": 2,
    }
    trained = train(for_stage(SimpleNamespace(**{**vars(cfg), **own, "folder": folder / "train"}), stores, map_file))
    if faults := contract.check_head(trained.head, short, "vllm"):
        raise StageFailed(faults[0])
    return trained


def _serve(short: Target, cfg: Any, head: Path, rows: list[chat.Answer]) -> str:
    from kimi_eagle.acceptance import serve
    from kimi_eagle.extract import session

    k = cfg.num_speculative_tokens
    config = serve.speculative_config(short, head, k, load_format="dummy", **session.options(cfg))
    if _draft_loads_alone():  # else vLLM makes the draft's weights up too, and only the contract check has read them
        config.llm["speculative_config"]["draft_load_config"] = {"load_format": "auto"}
    engine = session.start(cfg, config)
    try:
        requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids[: r.prompt_tokens]} for r in rows[:4]]
        found = engine.generate(requests, max_tokens=SERVED_TOKENS, ignore_eos=True)
        drafts = engine.metrics().get("vllm:spec_decode_num_drafts", 0)
    finally:
        engine.down()
    if not drafts or any(len(r["token_ids"]) != SERVED_TOKENS for r in found):
        raise StageFailed(
            f"the engine answered {sum(len(r['token_ids']) for r in found)} tokens with {drafts:.0f} drafts"
        )
    return f"{len(found)} texts of {SERVED_TOKENS} tokens, {drafts:.0f} drafts of {k}"


def _rows(short: Target, cfg: Any) -> list[chat.Answer]:
    """Rows as notebook 02 makes them, the answers arbitrary tokens of the tokenizer; every fourth is held out."""
    given = conversations.read(cfg.prompts, ROWS)
    asked = turns.prepare(short, given, cfg.held_out_fraction, cfg.max_model_len, ANSWER_TOKENS).prompts
    if len(asked) < 4:
        raise BadInput(f"prompts {Path(cfg.prompts).name!r}: {len(asked)} usable prompts; a rehearsal needs 4 or more.")
    usable = len(short.tokenizer)
    rows = []
    for index, prompt in enumerate(asked):
        answer = [(7919 * (index + 1) * (i + 1)) % (usable - 1) for i in range(ANSWER_TOKENS)]
        split, tokens = "train" if index % 4 else "heldout", prompt.token_ids + answer
        rows.append(chat.Answer(prompt.prompt_id, prompt.prompt_id, split, tokens, len(prompt.token_ids), "length"))
    return rows


def _patches() -> str:
    from kimi_eagle import compat

    found = compat.compat_rows()
    refused = [r for r in found if r["state"] == "refused"]
    if refused:
        raise MissingCapability(f"patch {refused[0]['id']} does not fit: {refused[0]['reason']}")
    needed = [r["id"] for r in found if r["state"] in ("needed", "applied")]
    return ", ".join(needed) or "none needed here"


def _files(name: str) -> Target:
    """The target's configuration and tokenizer; of a Hub name no weights are fetched."""
    if name in targets.MADE or paths.resolve(name).is_dir():
        return targets.describe(name)
    from huggingface_hub import snapshot_download

    try:
        return targets.describe(snapshot_download(name, ignore_patterns=["*.safetensors", "*.bin", "*.gguf", "*.pt"]))
    except Exception as error:
        raise MissingCapability(
            f"target {name}: its configuration is neither in the Hub's local cache nor to be fetched from here "
            f"({type(error).__name__}); give a folder with config.json and the tokenizer's files."
        ) from None


def _name(full: Target, part: str) -> str:
    """A tensor's name: the checkpoint's own where its files are here, else the usual one."""
    try:
        return full.tensor_name(part)
    except BadInput:
        return ("language_model." if full.is_wrapper else "") + SUFFIXES[part]


def _draft_loads_alone() -> bool:
    """Whether this vLLM takes a load format for the draft apart from the target's (read from its source)."""
    found = importlib.util.find_spec("vllm")
    file = Path(next(iter(found.submodule_search_locations))) / "config" / "speculative.py" if found else None
    return bool(file and file.is_file() and "draft_load_config" in file.read_text())


class _Steps:
    """Times named steps, tells each when it ends, and puts a failing step's name in front of its error."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell, self.seconds = tell, {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[str], None]]:
        words: list[str] = []
        begun = time.perf_counter()
        try:
            yield words.append
        except KimiEagleError as error:
            raise type(error)(f"rehearsal, {name}: {error}") from None
        except Exception as error:
            raise StageFailed(
                f"rehearsal, {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        self.seconds[name] = time.perf_counter() - begun
        self.tell(f"OK {self.seconds[name]:6.1f} s  {name}: {'; '.join(words)}")
