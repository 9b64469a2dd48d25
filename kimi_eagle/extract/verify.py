"""The proof that stored states are the target's: three checks that do not trust the code that stored them.

1. Reconstruction: the target's own final norm and lm_head, applied to the stored last state, must give the log-probs that the
   engine itself reported for those prompts in another request. Top-1 agreement would not do: it hid a wrong layer at 96 %.
2. Order: the same rows in another batch order and other batches must give the same states.
3. Hugging Face: the same layers' inputs computed by transformers, where the target fits (it shares no kernel with vLLM).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.chat import Answer
from kimi_eagle.errors import StageFailed
from kimi_eagle.extract import canary, loop
from kimi_eagle.extract import engine as engines
from kimi_eagle.hidden_store import Store
from kimi_eagle.target import Target

# Two experts whose routing scores lie closer than this may change places between two correct float32 kernels (states differ by
# 1e-5); the token's state is then another one, and so is every later state that attends to it. Such a tie ends the comparison of
# its row for the layers behind it, and is counted.
ROUTING_TIE = 1e-4
VOCAB_SLICE = 16384  # columns of lm_head at a time: a Kimi row of 163,840 logits never stands in memory whole


@dataclass(frozen=True)
class Bars:
    """What counts as right; `reconstruction` in nats, the others relative L2 errors. For float32 and for 16-bit states."""

    reconstruction: float
    order: float
    hugging_face: float


BARS = {"float32": Bars(1e-3, 1e-5, 1e-4), "bfloat16": Bars(5e-2, 5e-2, 5e-2), "float16": Bars(2e-2, 2e-2, 2e-2)}


class FinalHead:
    """The target's final RMS norm and lm_head, in float32, for log-probs of stored last states."""

    def __init__(self, target: Target):
        self.norm = target.load_tensor("norm").float()
        self.lm_head = target.load_tensor("lm_head")
        self.eps = float(target.text_config.get("rms_norm_eps", 1e-6))

    def log_probs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """log p(tokens[t]) in nats from the pre-norm last states [T, H], softmax over the whole vocabulary."""
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm
        total = torch.full((len(x),), -math.inf)
        for begin in range(0, len(self.lm_head), VOCAB_SLICE):
            logits = x @ self.lm_head[begin : begin + VOCAB_SLICE].float().T
            total = torch.logaddexp(total, logits.logsumexp(-1))
        chosen = (x * self.lm_head[tokens.long()].float()).sum(-1)
        return chosen - total


def reconstruction(target: Target, store: Store, plain: engines.Engine, samples: list[str]) -> dict[str, Any]:
    """Mean and largest |difference| in nats between log-probs from the stored last state and the engine's prompt log-probs."""
    head, differences, agree = FinalHead(target), [], []
    rows = {name: store.row(name) for name in samples}
    requests = [{"id": n, "prompt_token_ids": r.token_ids.tolist()} for n, r in rows.items()]
    for result in plain.generate(requests, max_tokens=1, prompt_logprobs=True):
        row = rows[result["id"]]
        reported = torch.tensor(result["prompt_logprobs"][1:])
        ours = head.log_probs(row.hidden_states[:-1, -1], row.token_ids[1:])
        differences.append((ours - reported).abs())
        agree.append(len(reported))
    all_of_them = torch.cat(differences)
    return {"mean_abs_nats": all_of_them.mean().item(), "max_abs_nats": all_of_them.max().item(), "tokens": sum(agree)}


def order(plan: loop.Plan, store: Store, extractor: engines.Engine, rows: list[Answer], folder: Path) -> dict[str, Any]:
    """Largest relative L2 difference per row and layer between the store and a second extraction in reversed order, alone and
    in pairs, so that batches, chunks and neighbours all differ."""
    again = sorted(rows, key=lambda r: r.sample_id, reverse=True)
    worst = 0.0
    for number, group in enumerate([again[:1], *(again[i : i + 3] for i in range(1, len(again), 3))]):
        other = loop.extract(plan, extractor, group, folder / f"again-{number}", say=lambda _: None)
        worst = max(
            [
                worst,
                *(
                    layer_errors(store.row(r.sample_id).hidden_states, other.row(r.sample_id).hidden_states)
                    .max()
                    .item()
                    for r in group
                ),
            ]
        )
    return {"max_relative_l2": worst, "rows": len(rows)}


def hugging_face(target: Target, store: Store, samples: list[str]) -> dict[str, Any]:
    """Relative L2 error per layer id against transformers' float32 forward, the largest over the samples.

    Also the token states that were compared, and the routing ties that ended the comparison of a row (ROUTING_TIE).
    """
    reference = Reference(target, store.layer_ids)
    worst, compared, ties = [0.0] * len(store.layer_ids), 0, 0
    for name in samples:
        row = store.row(name)
        states, ends = reference.states(row.token_ids)
        ties += sum(end < len(row.token_ids) for end in set(ends))
        for place, end in enumerate(ends):
            compared += end
            if end:
                error = layer_errors(states[:end, place : place + 1], row.hidden_states[:end, place : place + 1])
                worst[place] = max(worst[place], error.item())
    return {
        "relative_l2": dict(zip(map(str, store.layer_ids), worst, strict=True)),
        "rows": len(samples), "states": compared, "routing_ties": ties,
    }  # fmt: skip


def layer_errors(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[S]: the largest relative L2 error of any token, per layer, of states [T, S, H].

    Per token: an average over tokens, or max |difference| over max |state|, hides errors behind massive activations.
    """
    gap = (expected.float() - found.float()).norm(dim=-1)
    return (gap / expected.float().norm(dim=-1).clamp_min(1e-20)).amax(0)


class Reference:
    """transformers' own forward of the target's text model, hooked where vLLM's layer ids point."""

    def __init__(self, target: Target, layer_ids: list[int]):
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

        # The checkpoint's own code only where transformers has no class: it may be of another version of transformers.
        load: dict[str, Any] = {
            "dtype": torch.float32,
            "trust_remote_code": target.config.get("model_type") not in CONFIG_MAPPING,
        }
        if target.is_wrapper:
            fields = {k: v for k, v in target.text_config.items() if k not in ("auto_map", "model_type")}
            kind = "deepseek_v3" if target.is_mla else target.text_config["model_type"]
            prefix = target.tensor_name("norm").removesuffix("model.norm.weight")
            load |= {
                "config": AutoConfig.for_model(kind, **fields),
                "key_mapping": {"^" + prefix.replace(".", r"\."): ""},
            }
        self.model = AutoModelForCausalLM.from_pretrained(target.path, **load).eval()
        self.layer_ids = layer_ids
        self.seen: dict[int, torch.Tensor] = {}
        base = self.model.get_decoder()
        for k in layer_ids:
            module = base.layers[k] if k < len(base.layers) else base.norm
            module.register_forward_pre_hook(self._keep(k), with_kwargs=True)
        self.chosen = int(target.text_config.get("num_experts_per_tok") or 0)
        self.ties: dict[int, int] = {}  # MoE layer -> first position whose routing is a tie
        for number, layer in enumerate(base.layers):
            router = getattr(layer.mlp, "gate", None)
            if self.chosen and getattr(router, "e_score_correction_bias", None) is not None:
                router.register_forward_pre_hook(self._watch(number))

    def _watch(self, number: int) -> Any:
        """Routing as DeepSeek-V3 does it: experts by sigmoid score plus correction bias."""

        def hook(router: Any, args: tuple) -> None:
            logits = args[0].reshape(-1, args[0].shape[-1]).float() @ router.weight.float().T
            best = (logits.sigmoid() + router.e_score_correction_bias.float()).topk(self.chosen + 1).values
            close = (best[:, -2] - best[:, -1] < ROUTING_TIE).nonzero()
            if len(close):
                self.ties[number] = int(close[0])

        return hook

    def _keep(self, k: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            self.seen[k] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

        return hook

    def states(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """[T, S, H] of one prompt, and per layer id the number of leading tokens that no routing tie has touched."""
        self.ties.clear()
        with torch.inference_mode():
            self.model(token_ids.long()[None], use_cache=False)
        ends = [min([p for n, p in self.ties.items() if n < k], default=len(token_ids)) for k in self.layer_ids]
        return torch.stack([self.seen[k] for k in self.layer_ids], 1), ends


def fits_here(target: Target) -> bool:
    """True where transformers can hold the target in float32 in half of this machine's free memory."""
    import psutil

    stored = sum((target.path / f).stat().st_size for f in set(target.weight_map.values()))
    return target.quantization == "none" and stored * 2 < psutil.virtual_memory().available / 2


def verify(
    plan: loop.Plan,
    store: Store,
    plain: engines.Engine,
    extractor: engines.Engine,
    rows: list[Answer],
    folder: Path,
    count: int = 8,
) -> dict[str, Any]:
    """All checks on `count` rows of the store, spread over it; {reconstruction, order, hugging_face, bars, right}.

    The rows' longest and shortest are always among them. `right` is True where every check that ran is within its bar; the
    store then gets its canary.
    """
    sample = _spread(sorted((r for r in rows if r.sample_id in store.position), key=lambda r: len(r.token_ids)), count)
    names = [r.sample_id for r in sample]
    bars = BARS[plan.dtype]
    found: dict[str, Any] = {
        "reconstruction": reconstruction(plan.target, store, plain, names),
        "order": order(plan, store, extractor, sample, folder),
    }
    right = (
        found["reconstruction"]["mean_abs_nats"] < bars.reconstruction
        and found["order"]["max_relative_l2"] < bars.order
    )
    if fits_here(plan.target):
        found["hugging_face"] = hugging_face(plan.target, store, names)
        right = right and max(found["hugging_face"]["relative_l2"].values()) < bars.hugging_face
    found["bars"] = {"reconstruction": bars.reconstruction, "order": bars.order, "hugging_face": bars.hugging_face}
    if right:
        canary.write(store, bars.hugging_face)
    return {**found, "right": bool(right)}


def require(found: dict[str, Any]) -> None:
    """StageFailed where a verification did not come out right: nothing may be trained on such states."""
    if not found["right"]:
        layers = found.get("hugging_face", {}).get("relative_l2", {})
        raise StageFailed(
            f"the states are not the target's: log-probs differ by {found['reconstruction']['mean_abs_nats']:.2g} nats on average, "
            f"batch order by {found['order']['max_relative_l2']:.2g}, Hugging Face by {max(layers.values(), default=0):.2g}; "
            "see which patches are active with: kimi-eagle compat."
        )


def _spread(rows: list[Answer], count: int) -> list[Answer]:
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]
