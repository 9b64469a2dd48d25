"""Before an upgrade: what changes between two vLLM releases for this project, from their files alone.

Patches that fall away or come in, symbols that the patches, the back ends and speculators rest on, and the draft heads that
each release reads.
"""

import ast
import re
from pathlib import Path

from kimi_eagle.compat import registry
from kimi_eagle.compat.locate import registry_entries
from kimi_eagle.compat.source import Source, open_source

# What this project, or speculators' generator, calls by name: module and function, method or class.
WATCHED = (
    ("vllm.entrypoints.llm", "LLM.__init__"),
    ("vllm.entrypoints.llm", "LLM.generate"),
    ("vllm.entrypoints.llm", "LLM.collective_rpc"),
    ("vllm.model_executor.models.interfaces", "SupportsEagle3"),
    ("vllm.model_executor.models.interfaces", "EagleModelMixin"),
    ("vllm.model_executor.models.deepseek_v2", "DeepseekV2Model.forward"),
    ("vllm.model_executor.models.deepseek_v2", "DeepseekV2DecoderLayer.forward"),
    ("vllm.model_executor.models.llama", "LlamaModel.forward"),
    ("vllm.model_executor.models.kimi_k25", "KimiK25ForConditionalGeneration.forward"),
    ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding.forward_cpu"),
    ("vllm.triton_utils.dispatcher", "_rebind_kernels"),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector",
        "ExampleHiddenStatesConnector.__init__",
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector",
        "ExampleHiddenStatesConnector._submit_async_write",
    ),
    ("vllm.v1.spec_decode.extract_hidden_states", "ExtractHiddenStatesProposer.__init__"),
    ("vllm.v1.worker.worker_base", "WorkerBase.__init__"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__"),
    ("vllm.v1.core.kv_cache_utils", "get_kv_cache_config_from_groups"),
    ("vllm.v1.core.kv_cache_utils", "unify_hybrid_kv_cache_specs"),
    ("vllm.v1.request", "Request.__init__"),
    ("vllm.config.scheduler", "SchedulerConfig"),
)
HEADS = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
HEAD_KEYS = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "num_aux_hidden_states",
)


def compare(old: str | Path | None, new: str | Path) -> dict:
    """{from, to, patches, symbols, heads} between two vLLM; `old` None means the installed one.

    `patches` rows {id, from, to} with the states that `compat_rows` gives; `symbols` rows {symbol, change, detail}, change one
    of same, body, signature, moved, gone, new; `heads` rows {architecture, from, to} with the configuration keys read.
    """
    before, after = open_source(old, "vllm"), open_source(new, "vllm")
    return {
        "from": before.version,
        "to": after.version,
        "patches": [
            {"id": p.id, "from": _state(p, before), "to": _state(p, after)}
            for p in registry.patches()
            if p.package == "vllm"
        ],
        "symbols": [_symbol(before, after, module, name) for module, name in WATCHED],
        "heads": [{"architecture": a, "from": _head(before, a), "to": _head(after, a)} for a in HEADS],
    }


def upgrade_text(found: dict) -> str:
    """What `kimi-eagle compat --from OLD --to NEW` prints: the rows of `compare`, and `backends` where they were added."""
    lines = [f"from vllm {found['from']} to {found['to']}", "patches:"]
    for row in found["patches"]:
        word = {("needed", "not needed"): "falls away", ("not needed", "needed"): "comes in"}.get(
            (row["from"], row["to"])
        )
        lines.append(f"  {row['id']}: {row['from']} -> {row['to']}" + (f" ({word})" if word else ""))
    lines.append("symbols:")
    changed = [s for s in found["symbols"] if s["change"] not in ("same", "body")]
    lines += [f"  {s['symbol']}: {s['change']}, {s['detail']}" for s in changed] or [
        "  none moved, gone or of another signature"
    ]
    lines.append("draft heads:")
    for row in found["heads"]:
        lines.append(f"  {row['architecture']}: {_keys(row['from'])} -> {_keys(row['to'])}")
    if found.get("backends"):
        lines.append("back end that auto chooses on GPUs:")
        lines += [f"  {r['target']}: {r['backend']} ({r['reason']})" for r in found["backends"]]
    lines.append(
        "stores: stay valid; vLLM's layer ids mean the same in every release, and a store names target, ids and dtype itself."
    )
    return "\n".join(lines)


def _state(patch, source: Source) -> str:
    verdict = patch.verdict(source)
    if verdict.needed and patch.refusal(source):
        return "refused"
    return verdict.word


def _symbol(before: Source, after: Source, module: str, name: str) -> dict:
    row = {"symbol": f"{module}.{name}", "change": "same", "detail": ""}
    old, new = before.find(module, name), after.find(module, name)
    if old is None and new is None:
        return {**row, "change": "gone", "detail": "in neither"}
    if old is None:
        return {**row, "change": "new", "detail": f"line {new.line}"}
    if new is None:
        places = _elsewhere(after, module, name)
        if places:
            return {**row, "change": "moved", "detail": f"now in {', '.join(places)}"}
        return {**row, "change": "gone", "detail": "not found under that name"}
    was, now = _signature(old.node), _signature(new.node)
    if was != now:
        return {**row, "change": "signature", "detail": _difference(was, now)}
    return {**row, "change": "same" if old.digest == new.digest else "body"}


def _elsewhere(source: Source, module: str, name: str) -> list[str]:
    """Files below the module's own top folders that define the first part of `name` now."""
    first = name.split(".")[0]
    pattern = re.compile(rf"^(?:class|def) {re.escape(first)}\b", re.MULTILINE)
    under = "/".join(module.split(".")[:3]) + "/"
    return [path for path in source.files if path.startswith(under) and pattern.search(source.read(path) or "")][:3]


def _signature(node: ast.AST) -> list[str]:
    """Argument names, `=` after those with a default; of a class its members without a value (what must be given)."""
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
        return [ast.unparse(f.target) + ("=" if f.value is not None else "") for f in fields] + methods
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    bare = len(positional) - len(spec.defaults)
    names = [a.arg + ("=" if i >= bare else "") for i, a in enumerate(positional)]
    return names + [a.arg + ("" if d is None else "=") for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]


def _difference(was: list[str], now: list[str]) -> str:
    added, dropped = [n for n in now if n not in was], [n for n in was if n not in now]
    parts = [f"+ {', '.join(added)}" if added else "", f"- {', '.join(dropped)}" if dropped else ""]
    return "; ".join(p for p in parts if p) or "another order"


def _head(source: Source, architecture: str) -> list[str] | None:
    """The configuration keys that the head's class reads; None where the release does not know the architecture."""
    entry = registry_entries(source).get(architecture)
    path = source.module_path(entry[0]) if entry else None
    text = source.read(path) if path else None
    return None if text is None else [key for key in HEAD_KEYS if key in text]


def _keys(keys: list[str] | None) -> str:
    return "unknown to it" if keys is None else f"reads {', '.join(keys)}"
