"""The forecast against one H200: a Kimi-width target with random weights, real vLLM, an EAGLE-3 draft of Kimi width.

    python3 benchmarks/forecast_h200.py OUT [--ks 3,1,5,2,4] [--rates 0.645,0.393,0.24,0.146,0.089] [--budget-s 540]

Acceptance is set by vLLM's synthetic rejection sampler at the rates of a trained head. The forecast is fitted to the target's plain
steps alone. A pass of a Kimi-width head is bound by its reading, so the host's cost is taken as 0, or with `--host` measured first on
a target that waits for the host (SmolLM2's shape, `small`). Each engine lives in a process of its own, one after the other until the
budget is spent; OUT gets measured.json, forecast.json, engines.log and two figures. `--report` makes forecast and figures again from measured.json; `--tiny` is the same on a CPU with a toy target.

The target: hidden 7168, MLA, one dense layer and 12 MoE layers of 96 experts (8 chosen), which with bf16 weights is what 141 GB hold.
Random weights make every token of a request alike: the context's mean outweighs the token, so a request keeps to the same experts
and the head drafts one token over and over. `Weights` makes embeddings large and drafted tokens random, so that the tokens of a
verification are as different as those of different requests - real text lies between the two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
PLAIN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
# The published pooled rates of a Kimi draft at positions 1-3 (kimi-k26-v4.md); 4 and 5 keep the last conditional rate, 0.61.
RATES = (0.645, 0.393, 0.240, 0.146, 0.089)
CONTEXT, WARM = 32, 6


TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 13,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 96, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 0,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
# SmolLM2-135M's shape: so small that a step waits for the host, which is what it is measured for.
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "intermediate_size": 1536, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
# On a CPU, vLLM runs no Llama draft beside an MLA target (no common block size): the toy target is a Llama.
TINY = SMALL | {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096,
    "intermediate_size": 256, "rope_theta": 50000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


SHAPES = {"target": TARGET, "small": SMALL, "tiny": TINY}


class Weights:
    """Worker extension: gives random weights, and drafted tokens, the statistics that make routing differ from token to token."""

    def spread(self) -> int:
        """Norms 1, embeddings and router logits of unit variance, no router bias, drafts random; returns how many tensors changed."""
        import torch

        changed, runner = 0, self.model_runner
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        with torch.no_grad():
            for model in [runner.model] + ([drafter.model] if drafter else []):
                for name, tensor in model.named_parameters():
                    if "norm" in name and tensor.dim() == 1:
                        tensor.fill_(1.0)
                    elif name.endswith("gate.weight"):
                        tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
                    elif name.endswith("embed_tokens.weight"):
                        tensor.normal_(0.0, 1.0)
                    elif "e_score_correction_bias" in name:
                        tensor.zero_()
                    else:
                        continue
                    changed += 1
        if drafter:
            propose, vocabulary = drafter.propose, self.vllm_config.model_config.get_vocab_size()

            def random_tokens(*args, **kwargs):
                drafted = propose(*args, **kwargs)
                return drafted.random_(100, vocabulary) if isinstance(drafted, torch.Tensor) else drafted

            drafter.propose = random_tokens
        return changed


def draft_config(target: dict) -> dict:
    """An EAGLE-3 Llama head of the target's width, its whole vocabulary; at Kimi width an MLP of 12,288, as published drafts have it."""
    wide, heads = target["hidden_size"] > 1000, target["num_attention_heads"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": target["hidden_size"], "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads if wide else target["num_key_value_heads"],
        "head_dim": 128 if wide else target["head_dim"], "intermediate_size": 12288 if wide else target["intermediate_size"],
        "vocab_size": target["vocab_size"], "draft_vocab_size": target["vocab_size"], "target_hidden_size": target["hidden_size"],
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "torch_dtype": target["torch_dtype"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, target["num_hidden_layers"] // 2, target["num_hidden_layers"] - 3],
                         "use_aux_hidden_state": True},
    }  # fmt: skip


def measure(out: Path, shape: str, k: int, rates: list[float]) -> None:
    """One engine: steps of every concurrency, plain (k = 0) or with k drafted tokens; writes SHAPE-kN.json into `out`."""
    from vllm import LLM

    target, tiny = SHAPES[shape], shape == "tiny"
    for name, config in (("target", target), ("draft", draft_config(target))):
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(config))
    sizes = [c for c in (CONCURRENCY if k else PLAIN) if not tiny or c <= 4]
    options: dict = dict(
        model=str(out / "target"), load_format="dummy", skip_tokenizer_init=True, dtype=target["torch_dtype"], max_model_len=1024,
        max_num_seqs=max(sizes), max_num_batched_tokens=8192, enable_prefix_caching=False, disable_log_stats=False, seed=0,
        worker_extension_cls=f"{HERE.stem}.Weights",
    )  # fmt: skip
    if tiny:
        options |= dict(enforce_eager=True)
    else:
        options |= dict(
            gpu_memory_utilization=0.95, compilation_config={"cudagraph_capture_sizes": [c * (k + 1) for c in sizes]}
        )
    if k:
        options["speculative_config"] = {"method": "eagle3", "model": str(out / "draft"), "num_speculative_tokens": k}
        if not tiny:  # vLLM's CPU sampler has no synthetic acceptance
            options["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates[:k],
            }
    begun = time.perf_counter()
    llm = LLM(**options)
    loaded = time.perf_counter() - begun
    changed = llm.collective_rpc("spread")
    rows = [window(llm, c, k, target["vocab_size"], tiny) for c in sizes]
    record = {
        "shape": shape,
        "k": k,
        "rates": rates[:k],
        "load_s": loaded,
        "tensors_spread": changed,
        "rows": rows,
        "target": target,
        "draft": draft_config(target),
        "context": CONTEXT + WARM,
    }
    (out / f"{shape}-k{k}.json").write_text(json.dumps(record))


def window(llm, concurrency: int, k: int, vocabulary: int, tiny: bool) -> dict:
    """Tokens and microseconds of steady decode steps with `concurrency` requests; more steps for few, so that chance evens out."""
    import random

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    source, engine = random.Random(concurrency), llm.llm_engine
    steps = 10 if tiny else max(24, 160 // concurrency)
    params = SamplingParams(
        max_tokens=900, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    names = [f"c{concurrency}-k{k}-{i}" for i in range(concurrency)]
    for name in names:
        engine.add_request(
            name, {"prompt_token_ids": [source.randrange(100, vocabulary) for _ in range(CONTEXT)]}, params
        )
    started: set[str] = set()
    while len(started) < concurrency:
        started |= {o.request_id for o in engine.step()}
    for _ in range(WARM):
        engine.step()
    times, emitted = [], 0
    for _ in range(min(steps, 900 // (k + 1) - 2 * WARM)):
        begun = time.perf_counter()
        outputs = engine.step()
        times.append((time.perf_counter() - begun) * 1e6)
        emitted += sum(len(o.outputs[0].token_ids) for o in outputs)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    ordered = sorted(times)
    return {"concurrency": concurrency, "k": k, "steps": len(times), "emitted": emitted, "seconds": sum(times) / 1e6,
            "median_us": ordered[len(ordered) // 2], "p10_us": ordered[len(ordered) // 10], "p90_us": ordered[-1 - len(ordered) // 10]}  # fmt: skip


def report(out: Path) -> None:
    """Hold the forecast against measured.json: print and write forecast.json, draw the two figures."""
    sys.path.insert(0, str(HERE.parent.parent))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from kimi_eagle.plots import forecast as plots
    from kimi_eagle.plots import style
    from kimi_eagle.speedup import crossings, forecast
    from kimi_eagle.speedup.kimi_width import hold_against

    case = hold_against(json.loads((out / "measured.json").read_text()))
    table = case.table
    if table.empty:
        sys.exit("no engine with a draft finished: see engines.log")
    ks, concurrency = sorted(table["k"].unique()), sorted(table["concurrency"].unique())
    middle = ks[len(ks) // 2]
    turns = crossings(case.model, case.draft, case.acceptance, (middle,), limit=64)
    rows = json.loads(table.to_json(orient="records"))
    (out / "forecast.json").write_text(json.dumps({"summary": case.report, "crossings": turns, "rows": rows}, indent=1))

    def save(name):
        def keep(fig, alt=""):
            fig.savefig(out / name, dpi=style.DPI)
            plt.close(fig)

        return keep

    ahead = forecast(case.model, case.draft, case.acceptance, concurrency, ks, step_error=case.report["fit_rms"])
    style.show = save("forecast_speedup.png")
    plots.speedup(ahead, turns, table, title="Kimi width: forecast (lines) and measured (points)")
    style.show = save("forecast.png")
    plots.measured(table, title="Kimi width")
    print(table.round(3).to_string())
    print(json.dumps(case.report, default=float))


def run_engines(out: Path, jobs: list[tuple[str, int]], rates: str, budget_s: float) -> None:
    """An engine per (shape, k), one after the other, while the budget lasts; measured.json holds what is done so far at any time."""
    out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), env.get("PYTHONPATH", "")]))
    work, begun, longest = Path(tempfile.mkdtemp()), time.perf_counter(), 0.0
    for shape, k in jobs:
        left = budget_s - (time.perf_counter() - begun)
        if left < longest:
            print(f"{shape}, k = {k}: left out, {left:.0f} s left and an engine took {longest:.0f} s", flush=True)
            continue
        at, code = time.perf_counter(), 124
        command = [sys.executable, str(HERE), str(work), "--shape", shape, "--one", str(k), "--rates", rates]
        with (out / "engines.log").open("a") as log:
            try:
                code = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode
            except subprocess.TimeoutExpired:
                print(f"{shape}, k = {k}: ended, the budget is spent", flush=True)
        longest = max(longest, time.perf_counter() - at)
        print(f"{shape}, k = {k}: exit {code}, {time.perf_counter() - at:.0f} s", flush=True)
        if code:
            print("\n".join((out / "engines.log").read_text(errors="replace").splitlines()[-25:]), flush=True)
            if not k and shape != "small":
                sys.exit(1)
        done = [json.loads(f.read_text()) for f in sorted(work.glob("*-k*.json"))]
        (out / "measured.json").write_text(json.dumps(done, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ks", default="3,1,5,2,4")
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--host", action="store_true", help="measure the host's cost of a pass on SmolLM2's shape first"
    )
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--one", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="target", help=argparse.SUPPRESS)
    given = parser.parse_args()
    out = given.out.resolve()
    rates = [float(r) for r in given.rates.split(",")]
    if given.one >= 0:
        measure(out, given.shape, given.one, rates)
        return
    if not given.report:
        shape = "tiny" if given.tiny else "target"
        jobs = [("small", k) for k in (0, 1, 3, 5)] if given.host else []
        jobs += [(shape, k) for k in (0, *map(int, given.ks.split(",")))]
        run_engines(out, jobs, given.rates, given.budget_s)
    report(out)


if __name__ == "__main__":
    main()
