"""Extraction against plain prefill, in one run on one machine: tokens per second of each, as ratios.

    python3 benchmarks/extract.py OUT [--target smollm2|kimi-width|tiny-kimi|FOLDER] [--tokens 600000] [--repeats 5] [--dtype bfloat16]
                                      [--batched 8192] [--backends hooks,connector] [--defaults] [--hugging-face]

For every back end one engine; in it plain prefill (the same requests, one token each, nothing kept) and extraction into a fresh
store (`loop.extract`: states in shards, checked, synced, indexed) take turns, so that both meet the same machine. `--defaults` adds plain prefill in an
engine as vLLM comes: compiled, CUDA graphs, its core in a process of its own. `--hugging-face` adds transformers' forward without lm_head.
`kimi-width`: hidden 7168, MLA, one dense and four MoE layers with random weights, so 57,344 bytes a token at a high rate. The store lies in
OUT/store or --store; its disk's own write rate is measured there first. OUT gets extract.json.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

from kimi_eagle import target as targets
from kimi_eagle.extract import configure, engine, loop

sys.path.insert(0, str(Path(__file__).parent))
Row = namedtuple("Row", "sample_id token_ids loss_mask split")
KIMI_LAYERS = 5


def rows(total: int, vocabulary: int, longest: int) -> list[Row]:
    """Random tokens in rows of chat-like lengths (log-normal, median 220, at most `longest`), `total` tokens in all."""
    chance, made, used = random.Random(0), [], 0
    while used < total:
        length = min(longest, max(16, int(chance.lognormvariate(5.4, 0.6))))
        ids = [chance.randrange(100, vocabulary - 100) for _ in range(length)]
        made.append(Row(f"r{len(made):06d}", ids, [i > length // 3 for i in range(length)], "train"))
        used += length
    return made


def kimi_width(folder: Path) -> Path:
    """A checkpoint folder with a configuration alone."""
    from forecast_h200 import TARGET

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET | {"num_hidden_layers": KIMI_LAYERS}))
    return folder


def disk_rate(folder: Path, gigabytes: float) -> float:
    """Bytes per second written to `folder` in 64 MB files by three threads, each synced, as the store writes them."""
    from concurrent.futures import ThreadPoolExecutor

    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(64 << 20)

    def write(number: int) -> None:
        with open(folder / f"rate-{number}", "wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())

    count, begun = max(3, int(gigabytes * 1e9 / len(block))), time.perf_counter()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(count)))
    seconds = time.perf_counter() - begun
    shutil.rmtree(folder)
    return count * len(block) / seconds


def plain(running: engine.Engine, data: list[Row]) -> float:
    """Seconds of prefilling all rows, one token each."""
    requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids} for r in data]
    begun = time.perf_counter()
    running.generate(requests, max_tokens=1)
    return time.perf_counter() - begun


def hugging_face(target: targets.Target, data: list[Row], dtype: str, batched: int) -> float:
    """Seconds of transformers' forward of the decoder alone, rows sorted by length and padded to batches of `batched` tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=dtype).to(device).eval().get_decoder()
    ordered = sorted((r.token_ids for r in data), key=len)
    batches: list[list[list[int]]] = [[]]
    for ids in ordered:
        if batches[-1] and (len(batches[-1]) + 1) * len(ids) > batched:
            batches.append([])
        batches[-1].append(ids)
    begun = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            longest = len(batch[-1])
            padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch], device=device)
            mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch], device=device)
            model(input_ids=padded, attention_mask=mask, use_cache=False)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    """Measure what the command line names; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batched", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--backends", default="hooks,connector")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--hugging-face", action="store_true")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.store or options.out / "store"
    made = options.target == "kimi-width"
    target = targets.describe(kimi_width(options.out / "target") if made else options.target)
    load = {"load_format": "dummy", "skip_tokenizer_init": True} if made else {}
    limits = {"dtype": options.dtype, "max_model_len": 2048, "max_batched_tokens": options.batched,
              "max_sequences": options.sequences, **load}  # fmt: skip
    data = rows(options.tokens, target.vocab_size, 2000)
    warm, tokens = data[: max(1, len(data) // 10)], sum(len(r.token_ids) for r in data)
    seconds: dict[str, list[float]] = {}
    notes: dict = {
        "target": options.target,
        "tokens": tokens,
        "rows": len(data),
        "batched_tokens": options.batched,
        "dtype": options.dtype,
    }

    def keep(name: str, taken: float) -> None:
        seconds.setdefault(name, []).append(taken)
        print(f"{name}: {tokens / taken:,.0f} tokens/s", flush=True)

    for name in [b for b in options.backends.split(",") if b]:
        plan = loop.plan(target, [1, 2, 3] if made else [], backend=name, dtype=options.dtype)
        notes["bytes_per_token"] = len(plan.layer_ids) * target.hidden_size * (4 if options.dtype == "float32" else 2)
        running = engine.start(
            configure.engine_config(target, "extract", **limits, **plan.engine_options), idle_minutes=5
        )
        try:
            notes["engine"] = running.call("describe")
            plain(running, warm)
            loop.extract(plan, running, warm, store / "warm")
            for _ in range(options.repeats):
                keep(f"plain, engine of {name}", plain(running, data))
                begun = time.perf_counter()
                kept = loop.extract(plan, running, data, store / "kept")
                keep(name, time.perf_counter() - begun)
                assert len(kept) == len(data), f"{len(kept)} of {len(data)} rows"
                notes["store_bytes"] = sum(s["bytes"] for s in kept.shards)
                shutil.rmtree(store / "kept")
        finally:
            running.down()
        shutil.rmtree(store)
    if options.defaults:
        config = configure.engine_config(target, "plain", **limits)
        config = replace(config, env={**config.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        running = engine.start(config, idle_minutes=5)
        plain(running, warm)
        for _ in range(options.repeats):
            keep("plain, vLLM as it comes", plain(running, data))
        running.down()
    if options.hugging_face:
        hugging_face(target, warm, options.dtype, options.batched)
        for _ in range(options.repeats):
            keep("Hugging Face, without lm_head", hugging_face(target, data, options.dtype, options.batched))
    if "store_bytes" in notes:
        notes["disk_bytes_per_s"] = disk_rate(store, min(4.0, notes["store_bytes"] / 1e9))
    table = {
        name: {"tokens_per_s": [round(tokens / s) for s in times], "median": round(tokens / statistics.median(times))}
        for name, times in seconds.items()
    }
    for name, row in table.items():
        beside = table.get(f"plain, engine of {name}")
        if beside:
            row["of_plain"] = [
                round(p / s, 3) for p, s in zip(seconds[f"plain, engine of {name}"], seconds[name], strict=True)
            ]
            row["of_plain_median"] = round(statistics.median(row["of_plain"]), 3)
            row["gb_per_s"] = round(row["median"] * notes["bytes_per_token"] / 1e9, 2)
    (options.out / "extract.json").write_text(json.dumps({"notes": notes, "table": table}, indent=1))
    print(json.dumps({"notes": notes, "table": table}, indent=1))


if __name__ == "__main__":
    main()
