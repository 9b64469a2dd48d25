"""`kimi-eagle estimate`: what a run will take, from its parameters and the target's configuration alone, in a second.

Nothing here imports vLLM, torch or transformers, makes a target, or asks a network.
"""

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

from kimi_eagle import conversations, paths
from kimi_eagle.errors import BadInput
from kimi_eagle.extract.budget import bytes_per_token
from kimi_eagle.speedup.sizes import KIMI_K2, draft_sizes
from kimi_eagle.target import describe
from kimi_eagle.tiny_kimi import TEXT as TINY_KIMI

# SmolLM2-135M's configuration, so that an estimate does not have to make the checkpoint first.
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}
CHARACTERS_PER_TOKEN = (
    3.5  # English prompts in chat format, on the low side: the estimate should not be under what is needed
)
TEMPLATE_TOKENS = 40  # what a chat template adds to a turn, on the high side
KIMI_LOAD_MINUTES = 27.0  # seen: INT4 experts, eight GPUs; a load measured here counts before it
# The engines that notebooks open, and those that 02 (verification) and 05 (speeds, at every concurrency) call once more:
# where one engine fits in memory at a time, each of these calls loads it again. A test holds both to the notebooks.
ENGINES = {
    "00": ("plain",),
    "01": ("profile",),
    "02": ("plain", "extract"),
    "03": (),
    "04": (),
    "05": ("plain", "speculative", "extract"),
}
CALLED_AGAIN = {"02": ("plain", "extract"), "05": ("plain", "speculative")}


def estimate(values: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run with the parameters `values` (all notebooks', defaults included).

    {bytes_per_token, prompts, answered, tokens, states_gb, disk_free_gb, fits, tokens_that_fit, head_parameters, head_gb, minutes,
    tokens_per_second, extraction_hours, engine_loads, load_minutes}: tokens, sizes, hours and loads are upper bounds (every answer as
    long as allowed; `answered` conversations by their characters; no engine left up by a notebook before); minutes are the
    declared ones of notebooks 00 to 05; the speed and a load's minutes are None where no run on this machine says.
    """
    config = configuration(values["target"])
    states = len(values["auxiliary_layers"] or (0, 0, 0)) + 1
    each = bytes_per_token(states, config["hidden_size"], values["dtype"])
    rows = conversations.read(values["prompts"], values["max_prompts"])
    answered = conversations.answered(rows)
    if answered:
        tokens = sum(min(row_tokens(row), values["max_model_len"]) for row in rows)
    else:
        tokens = values.get("samples_per_prompt", 1) * sum(row_tokens(row) + values["answer_tokens"] for row in rows)
    free = free_bytes()
    head = draft_sizes(
        config,
        attention=values["head_attention"],
        draft_vocab=values["draft_vocab_size"],
        aux_states=states - 1,
        weight_bytes=1,
    )
    speed, load = measured(values["target"], config["hidden_size"], values["dtype"])
    return {
        "bytes_per_token": each,
        "prompts": len(rows),
        "answered": answered,
        "tokens": tokens,
        "states_gb": tokens * each / 1e9,
        "disk_free_gb": free / 1e9,
        "fits": tokens * each < free,
        "tokens_that_fit": free // each,
        "head_parameters": int(head.dense_bytes),
        "head_gb": head.dense_bytes * (4 if values["dtype"] == "float32" else 2) / 1e9,
        "minutes": values["expected_minutes"],
        "tokens_per_second": speed,
        "extraction_hours": tokens / speed / 3600 if speed else None,
        "engine_loads": engine_loads(values),
        "load_minutes": load or (KIMI_LOAD_MINUTES if "kimi-k2" in values["target"].lower() else None),
    }


def engine_loads(values: dict[str, Any]) -> dict[str, int]:
    """At most so many engine loads per notebook."""
    loads = {stage: len(roles) for stage, roles in ENGINES.items()} | {"01": len(values["profile_graphs"])}
    if not values["engines_together"]:
        loads["02"] += len(CALLED_AGAIN["02"])
        loads["05"] += len(CALLED_AGAIN["05"]) * len(values["serve_concurrency"])
    return loads


def measured(target: str, hidden_size: int, dtype: str) -> tuple[float | None, float | None]:
    """(tokens per second of the last extraction, median minutes of a load) in runs under outputs/ of this target and dtype.

    None for what no run says: a load's time is in a run's logs where it took more than some seconds.
    """
    speeds, loads = [], []
    for file in paths.outputs().glob("*/02_*/states/*/train/speed.json"):
        try:
            manifest = json.loads((file.parent / "manifest.json").read_text())
            speed = json.loads(file.read_text())["tokens_per_second"]
            found = (manifest["target"]["name"], manifest["hidden_size"], manifest["dtype"])
        except (OSError, ValueError, KeyError, TypeError):  # half-written, or of another version
            continue
        if found in {(name, hidden_size, dtype) for name in (target, Path(target).name)}:
            speeds.append((file.stat().st_mtime, speed))
            for log in (file.parents[4] / "logs").glob("*.log"):
                loads += re.findall(r"^engine \w+: ready after (\d+) s", log.read_text(errors="replace"), re.MULTILINE)
    return max(speeds)[1] if speeds else None, statistics.median(map(int, loads)) / 60 if loads else None


def text(figures: dict[str, Any]) -> str:
    """The estimate as lines of a terminal."""
    fits = (
        "fits"
        if figures["fits"]
        else "DOES NOT FIT: choose another outputs folder, or lower max_prompts or answer_tokens"
    )
    hours = "no rate measured yet: the first extraction of this target notes one"
    if figures["tokens_per_second"]:
        hours = f"{figures['extraction_hours']:.2g} hours at {figures['tokens_per_second']:,.0f} tokens/s, as measured here, answering aside"
    loads, each = figures["engine_loads"], figures["load_minutes"]
    total, each_notebook = sum(loads.values()), ", ".join(f"{stage} {n}" for stage, n in loads.items() if n)
    loading = f"{each:.2g} minutes each, {each * total:.0f} in all" if each else "no load timed yet"
    rows = "conversations with answers" if figures["answered"] else "prompts"
    return "\n".join(
        [
            f"states    {figures['bytes_per_token']:,} bytes per token, {figures['prompts']:,} {rows}, at most {figures['tokens']:,} tokens",
            f"disk      {figures['states_gb']:.2f} GB of states, {figures['disk_free_gb']:.1f} GB free ({figures['tokens_that_fit']:,} tokens): {fits}",
            f"head      {figures['head_parameters'] / 1e6:.1f} million parameters of its own, {figures['head_gb']:.2f} GB",
            f"extract   {hours}",
            f"engines   {each_notebook} loads at most, {total} in all ({loading})",
            f"time      {', '.join(f'{i:02} {m:g}' for i, m in enumerate(figures['minutes']))} minutes as declared, {sum(figures['minutes']):g} in all",
        ]
    )


def configuration(name: str) -> dict[str, Any]:
    """The text configuration of a target from what is at hand; BadInput where nothing on this machine says."""
    if name == "smollm2":
        return SMOLLM2
    if name == "tiny-kimi":
        return TINY_KIMI
    file = paths.resolve(name) / "config.json"
    if not file.is_file():
        file = _hub_cache(name)
    if file:
        return describe(file.parent).text_config
    if "kimi-k2" in name.lower():
        return KIMI_K2
    raise BadInput(
        f"target {name!r}: no configuration of it on this machine; give a checkpoint folder, or fetch it first."
    )


def row_tokens(row: dict[str, Any]) -> int:
    """Estimated tokens of a prompt or of a whole conversation, from its characters and what the template adds to each turn."""
    turns = len(row.get("messages", "1"))
    return TEMPLATE_TOKENS * turns + int(conversations.characters(row) / CHARACTERS_PER_TOKEN)


def free_bytes() -> int:
    """Free bytes where outputs/ is, or will be."""
    place = paths.outputs().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a Hub name
        return None
    return Path(found) if isinstance(found, str) else None
