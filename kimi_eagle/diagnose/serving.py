"""What vLLM makes of a target here: back ends, patches, where its architecture is defined, and whether it still speaks sense."""

import re
from pathlib import Path
from typing import Any

from kimi_eagle import compat, paths
from kimi_eagle.diagnose import probes
from kimi_eagle.diagnose.rows import BAD, NOTE, OK, Row
from kimi_eagle.errors import KimiEagleError, StageFailed
from kimi_eagle.extract import configure, engine
from kimi_eagle.target import Target, describe

# Asked of every real model: a short answer that any of them knows, and that wrong kernels or weights lose at once.
QUESTION = "The capital of France is"
ANSWER_TOKENS = 8
REPLACED_LETTERS = re.compile(r"[\ufffd\x00-\x08]")


def backends(target: Target, *, dtype: str, tensor_parallel: int = 1, facts: dict[str, Any] | None = None) -> list[Row]:
    """The attention, expert and linear kernels that vLLM itself chooses for `target` here; `facts` replaces the probe's answer.

    The probe builds one rank of a single-GPU engine: the choice depends on the card and the target, not on the number of cards.
    """
    if facts is None:
        config = configure.engine_config(target, "plain", dtype=dtype, tensor_parallel=1)
        facts = probes.ask("backends", {"target": config.target, "llm": config.llm}, env=config.env)
    if "error" in facts:
        return [
            Row(
                "back ends",
                BAD,
                f"vLLM cannot build {target.name} here: {facts['error']}",
                "see `kimi-eagle compat`, and the message above",
            )
        ]
    rows = [Row("model class", OK, f"{facts['architecture']} (checkpoint: {target.architecture})")]
    rows += [
        Row(f"{kind} back end", OK, "; ".join(facts[kind]))
        for kind in ("attention", "experts", "linear")
        if facts[kind]
    ]
    wide = any("MLA" in name for name in facts["attention"])
    if target.is_mla and not wide:
        rows.append(
            Row(
                "MLA",
                BAD,
                "vLLM chose no MLA back end for an MLA target",
                "its cache would take an order of magnitude more memory",
            )
        )
    return rows


def patches() -> list[Row]:
    """Every known patch of the installed vLLM and speculators: needed and applied, not needed, or refused."""
    rows = []
    for entry in compat.compat_rows():
        if entry["verdict"] == "not installed":
            continue
        state = {"not needed": OK, "would apply": OK}.get(entry["state"], BAD)
        advice = {"refused": entry["reason"], "off": f"switched off by {compat.SELECTION}"}.get(entry["state"], "")
        rows.append(
            Row(
                f"patch {entry['id']}", state, f"{entry['verdict']}: {entry['state']} ({entry['symptom'][:90]})", advice
            )
        )
    return rows


def known_answer(
    target: Target, answer: str, *, dtype: str, tensor_parallel: int = 1, port: int = 0, idle_minutes: float = 1
) -> list[Row]:
    """Ask a real engine for the capital of France, greedily, and look for `answer` in what it says.

    answer "" is for a target with random weights, whose text says nothing: then only that it generates is seen. The engine is
    ended afterwards: the next notebook's is configured differently, and two would not fit on one card.
    """
    config = configure.engine_config(target, "plain", dtype=dtype, tensor_parallel=tensor_parallel, port=port)
    running = engine.start(config, idle_minutes=idle_minutes)
    try:
        tokens = target.tokenizer.encode(QUESTION)
        result = running.generate([{"id": 0, "prompt_token_ids": list(tokens)}], max_tokens=ANSWER_TOKENS)[0]
        chosen = re.findall(
            r"Using (\S+?)(?: attention)? backend", (running.folder / "log.txt").read_text(errors="replace")
        )
    finally:
        running.down()
    said = target.tokenizer.decode(result["token_ids"])
    rows = [judge(said, answer, len(result["token_ids"]))]
    if chosen:
        rows.append(Row("back ends in the log", NOTE, ", ".join(dict.fromkeys(chosen))))
    return rows


def judge(said: str, answer: str, tokens: int) -> Row:
    """The verdict on a generated text: `answer` must be in it; unreadable or repeated text is garbage."""
    shown = f"{QUESTION!r} -> {said!r}"
    if tokens == 0:
        return Row("known answer", BAD, "no token was generated", "look into the engine's log")
    if not answer:
        return Row("known answer", NOTE, f"{shown} (random weights: only that it generates is checked)")
    if answer.lower() in said.lower():
        return Row("known answer", OK, shown)
    words = said.split()
    garbage = bool(REPLACED_LETTERS.search(said)) or len(words) < 2 or len(set(words)) <= len(words) // 2
    kind = "garbage" if garbage else f"readable, but without {answer!r}"
    return Row(
        "known answer",
        BAD,
        f"{shown}: {kind}",
        "wrong kernels, weights or dtype: compare dtype float32 and `kimi-eagle compat`",
    )


def where_defined(target: Target) -> list[Row]:
    """Class, file and line of the installed vLLM that serve the target, from the outer wrapper inwards, read without importing it."""
    from kimi_eagle.compat.locate import PROTOCOL, locate

    try:
        found = locate(target.architecture)
    except KimiEagleError as error:
        return [Row("architecture", BAD, str(error), "take a vLLM that has it, or see `kimi-eagle compat`")]
    rows = []
    for part in found.parts:
        place = f"{part.cls.name}, {part.cls.file}:{part.cls.line}" if part.cls else part.note
        rows.append(Row(f"class of model.{part.path}" if part.path else "class of the model", OK, place))
    if found.protocol:
        ready = found.parts[0].implements
        advice = (
            "" if ready else f"EAGLE-3 needs {PROTOCOL} on the outer class: `kimi-eagle locate {target.architecture}`"
        )
        rows.append(Row(PROTOCOL, OK if ready else BAD, "implemented" if ready else "not implemented", advice))
    return rows


def target_row(name: str) -> tuple[Target, Row]:
    """The target and what it is, in a line."""
    target = describe(name)
    size = sum(f.stat().st_size for f in Path(target.path).glob("*.safetensors")) / 2**30
    attention = "MLA" if target.is_mla else f"{target.num_attention_heads} heads"
    line = f"{target.architecture}, {target.num_layers} layers, width {target.hidden_size}, {attention}, {size:.2f} GiB"
    return target, Row(f"target {target.name}", OK, f"{line}, quantization {target.quantization}")


def engines() -> list[Row]:
    """Engines that are up already, and hold memory or ports."""
    found = engine.running()
    if not found:
        return [Row("running engines", OK, "none")]
    return [
        Row(
            f"engine {r.key}", NOTE, f"{r.role}, {Path(r.target).name}, idle {r.idle_s:.0f} s", "kimi-eagle engine down"
        )
        for r in found
    ]


def caches() -> list[Row]:
    """Where made targets are kept, by name only."""
    made = sorted(p.name for p in (paths.cache() / "targets").glob("*") if not p.name.startswith("."))
    return [Row("made targets", NOTE, ", ".join(made) or "none yet")]


def require_sense(rows: list[Row]) -> None:
    """StageFailed where the known answer was wrong: whatever is measured on such an engine means nothing."""
    wrong = [row for row in rows if row.what == "known answer" and row.state == BAD]
    if wrong:
        raise StageFailed(f"the target does not speak sense here: {wrong[0].found}; {wrong[0].to_do}.")
