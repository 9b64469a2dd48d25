"""Training throughput of a Kimi-width head on one GPU: tokens per second, peak memory, model FLOP utilisation, and a profile.

    python3 benchmarks/train_h200.py OUT [--rows 4] [--steps 6] [--row-tokens 4096] [--ttt 4] [--attention mla] [--tiny]

Synthetic bfloat16 states, packed rows of several documents; one optimizer step is `rows` rows, as in training/loop.py. The matrix rate
that the utilisation is held against is measured in the same process, on a square product and on the head's own largest shape.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.eagle3.loss import TargetOutput
from kimi_eagle.eagle3.model import Head
from kimi_eagle.training.flops import per_token
from kimi_eagle.training.row_loss import row_loss, trained_positions
from kimi_eagle.training.rows import Packed

KIMI = dict(
    hidden_size=7168, target_hidden_size=7168, intermediate_size=18432, num_heads=64, num_kv_heads=64, head_dim=192, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262144,
    vocab_size=163840, draft_vocab_size=32000, layer_ids=(2, 30, 58), rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
)  # fmt: skip
TINY = KIMI | dict(
    hidden_size=64, target_hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=2, head_dim=24, q_lora_rank=16, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=512, vocab_size=512, draft_vocab_size=128,
)  # fmt: skip


def matrix_rate(shape: tuple[int, int, int], device: torch.device) -> float:
    """Operations per second of a bfloat16 product of that shape, median of several windows."""
    m, k, n = shape
    a, b = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    for _ in range(5):
        a @ b
    seconds = []
    for _ in range(5):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(20):
            a @ b
        synchronize(device)
        seconds.append((time.perf_counter() - begun) / 20)
    return 2 * m * k * n / statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_row(tokens: int, config: HeadConfig, device: torch.device, documents: int = 4) -> Packed:
    """A packed row of random states: `documents` texts, three quarters of each trained."""
    at = torch.arange(tokens, device=device)
    length = tokens // documents
    states = torch.randn(tokens, config.num_aux + 1, config.target_hidden_size, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (tokens,), device=device)
    return Packed(ids, at // length, at % length >= length // 4, states)


def step(head, output, rows, ttt: int, optimizer, flex: bool, device) -> None:
    """One optimizer step over `rows`, as training/loop.py takes it."""
    masks = [trained_positions(r, ttt) for r in rows]
    trained = [sum(int(m[j].sum()) for m in masks) for j in range(ttt)]
    scales = [1.0 / max(1, n) / ttt for n in trained]
    for row in rows:
        with torch.autocast(device.type, torch.bfloat16):
            value, _ = row_loss(head, output, row, ttt, "kl", scales, flex)
        value.backward()
    torch.nn.utils.clip_grad_norm_([p for p in head.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--ttt", type=int, default=4)
    parser.add_argument("--attention", default="mla")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    fields = dict(TINY if given.tiny else KIMI, attention=given.attention)
    if given.attention == "llama":
        fields |= dict(head_dim=128 if not given.tiny else 16)
    config = HeadConfig(**fields)
    embedding = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device=device) * 0.02
    kept = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    head = Head(config, embedding, kept - torch.arange(len(kept))).to(device)
    lm_head = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device=device) * 0.02
    norm = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)
    output = TargetOutput(norm, lm_head, 1e-5, head.target_ids)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-5, fused=True)
    flex = device.type == "cuda"
    rows = [make_row(given.row_tokens, config, device) for _ in range(given.rows)]
    begun = time.perf_counter()
    for _ in range(2):
        step(head, output, rows, given.ttt, optimizer, flex, device)
    synchronize(device)
    warm = time.perf_counter() - begun
    if flex:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(given.steps):
        begun = time.perf_counter()
        step(head, output, rows, given.ttt, optimizer, flex, device)
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    tokens, median = given.rows * given.row_tokens, statistics.median(seconds)
    terms = per_token(config, given.ttt, given.row_tokens / 4 / 2)
    shapes = {"square": (8192, 8192, 8192), "mlp": (given.row_tokens, config.hidden_size, config.intermediate_size)}
    peaks = {name: matrix_rate(s if not given.tiny else (256, 256, 256), device) for name, s in shapes.items()}
    reached = sum(terms.values()) * tokens / median
    figures = {
        "device": torch.cuda.get_device_name() if flex else "cpu", "torch": torch.__version__, "attention": given.attention,
        "rows": given.rows, "row_tokens": given.row_tokens, "ttt_steps": given.ttt, "parameters": config.parameters(),
        "tokens_per_s": tokens / median, "spread_s": [min(seconds), max(seconds)], "warm_up_s": warm,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if flex else 0.0, "flop_per_token": terms,
        "tflop_s": reached / 1e12, "matrix_tflop_s": {k: v / 1e12 for k, v in peaks.items()},
        "utilisation": {k: reached / v for k, v in peaks.items()},
    }  # fmt: skip
    print(json.dumps(figures, indent=1), flush=True)
    (given.out / f"train_{given.attention}.json").write_text(json.dumps(figures, indent=1))
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if flex else [])
    with torch.profiler.profile(activities=activities) as profile:
        step(head, output, rows[:1], given.ttt, optimizer, flex, device)
        synchronize(device)
    order = "self_cuda_time_total" if flex else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)
    (given.out / f"profile_{given.attention}.txt").write_text(table)


if __name__ == "__main__":
    main()
