"""The loop: one process, or several under torchrun that add their gradients; every step can be the last before a kill."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kimi_eagle import vocab_map
from kimi_eagle.acceptance.simulate import greedy_tokens, simulate
from kimi_eagle.acceptance.statistics import summarize
from kimi_eagle.eagle3 import checkpoint
from kimi_eagle.eagle3.config import for_target
from kimi_eagle.eagle3.loss import TargetOutput
from kimi_eagle.eagle3.model import Head
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.hidden_store import Store
from kimi_eagle.target import describe
from kimi_eagle.training import rows, run_state
from kimi_eagle.training.data_facts import data_facts
from kimi_eagle.training.device import device_of, peak_memory_mb, say_out_of_memory
from kimi_eagle.training.initial import initial_head, parameter_table, take_over
from kimi_eagle.training.optimizer import learning_rate_factor, make_optimizer
from kimi_eagle.training.parallel import Replicas, Shards
from kimi_eagle.training.row_loss import RowCounts, row_loss, trained_positions
from kimi_eagle.training.settings import TrainConfig, TrainResult

DENSE_TOKENS = 1024  # longest row whose attention is dense on a GPU; beyond it flex attention's compile time pays


class Trainer:
    """One process of a run. `world` processes take turns over the rows and sum their gradients, so that a step of
    `batch_rows` rows on each equals a step of `world * batch_rows` rows on one."""

    def __init__(self, config: TrainConfig, rank: int = 0, world: int = 1) -> None:
        self.config, self.rank, self.world = config, rank, world
        torch.manual_seed(config.seed)
        self.device = device_of(config.device)
        on_gpu = self.device.type == "cuda"
        self.low_precision = config.precision == "bfloat16" or (config.precision == "auto" and on_gpu)
        long = config.row_tokens > DENSE_TOKENS and on_gpu
        self.flex = config.attention == "flex" or (config.attention == "auto" and long)
        if self.flex and not on_gpu:
            raise MissingCapability("training: attention 'flex' has no backward pass on a CPU; use 'dense' or 'auto'.")
        target = describe(config.target)
        self.store, self.held_out = Store(config.train_store), Store(config.held_out_store)
        layer_ids = rows.check_stores(self.store, self.held_out, target)
        self.map = rows.load_map(config.vocab_map, self.store, target)
        self.target = target
        size = len(self.map.d2t) if self.map else target.vocab_size
        flags = {k: getattr(config, k) for k in ("norm_before_residual", "fc_norm", "norm_output")}
        shape = for_target(target, config.head_attention, size, layer_ids, **flags)
        self.head = initial_head(shape, target, self.map.d2t if self.map else None, config.initial, config.seed)
        if config.initial_head:
            take_over(self.head, checkpoint.load(config.initial_head, target))
        self.head.lm_head.weight.requires_grad_(config.train_lm_head)
        self.head.to(self.device)
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        self.head.embedding = self.head.embedding.to(dtype)
        self.output = TargetOutput.of(target, self.head.target_ids, self.device, dtype)
        kind = Shards if config.parallel == "fsdp2" and world > 1 else Replicas
        self.parallel: Replicas = kind(self.head, world, row_loss)
        self.optimizer = make_optimizer(self.head, config)
        plans = [rows.plan(self.store, config.row_tokens, config.seed, epoch) for epoch in range(config.epochs)]
        size = config.batch_rows * world
        self.batches = [
            (epoch, plan[i : i + size]) for epoch, plan in enumerate(plans) for i in range(0, len(plan), size)
        ]
        self.folder = Path(config.folder)
        self.digest = f"{config.digest()}/{world}/{self._data_digest()}"
        self.step, self.trained, self.seconds, self.best = 0, 0, 0.0, {"acceptance_length": 0.0, "step": 0}
        count = config.evaluations or config.epochs
        self.evaluate_at = {round(len(self.batches) * (i + 1) / count) for i in range(count)}
        self.held_out_ids = self.held_out.sample_ids[: config.evaluation_samples]
        self.greedy: dict[str, Tensor] | None = None
        self.data: dict[str, Any] = {}

    def _data_digest(self) -> str:
        ids = vocab_map.count_tokens(self.store, self.head.config.vocab_size).data_sha256
        return ids + (f"/{self.map.identity['data_sha256']}/{len(self.map.d2t)}" if self.map else "")

    def run(self) -> TrainResult:
        """Train to the end (from the newest state where there is one) and return the result."""
        state = run_state.newest(self.folder / "state", self.digest)
        if state:
            self._restore(state)
        self.metrics = run_state.Metrics(self.folder / "metrics.jsonl", self.step) if self.rank == 0 else None
        board = self._board()
        if self.rank == 0 and not self.step:
            self.data = data_facts(self.store, self.output)
            self.metrics.add(step=0, data=self.data, parameters=parameter_table(self.head))
        if self.step < len(self.batches):
            self._rehearse()
        saved = begun = time.monotonic()
        before = self.seconds
        bar = tqdm(
            total=len(self.batches), initial=self.step, desc="train", unit="step", mininterval=5, disable=self.rank > 0
        )
        while self.step < len(self.batches):
            figures = self._step(*self.batches[self.step])
            self.step += 1
            self.seconds = before + time.monotonic() - begun
            bar.set_postfix_str(f"loss {figures['loss']:.3f}, {figures['tokens_per_second']:.0f} tok/s", refresh=False)
            bar.update()
            if self.rank == 0:
                self._log(board, figures)
            elif not self.parallel.collective:
                continue
            if self.step in self.evaluate_at:
                self._select(board)
            if self.step == len(self.batches) or self._due(saved):
                self.seconds = before + time.monotonic() - begun
                self._save()
                saved = time.monotonic()
        bar.close()
        if self.rank == 0:
            board.close()
            self.metrics.close()
        return self._result(resumed=state is not None)

    def _step(self, epoch: int, planned: list[list[rows.Piece]]) -> dict[str, Any]:
        config, begun = self.config, time.monotonic()
        mine = [
            rows.load(self.store, pieces, self.device, torch.float32) for pieces in planned[self.rank :: self.world]
        ]
        masks = [trained_positions(row, config.ttt_steps) for row in mine]
        trained = torch.tensor(
            [sum(int(m[j].sum()) for m in masks) for j in range(config.ttt_steps)], dtype=torch.float64
        )
        trained = self.parallel.summed(trained)
        weights = [config.step_decay**j for j in range(config.ttt_steps)]
        scales = [w / max(1.0, float(n)) / sum(weights) for w, n in zip(weights, trained, strict=True)]
        matched, losses = torch.zeros(2, config.ttt_steps, dtype=torch.float64)
        for row in mine:
            counts = self._backward(row, scales)
            matched += torch.stack(counts.matched).cpu()
            losses += torch.stack(counts.loss).cpu()
        self.parallel.reduce()
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        norm = float(norm.full_tensor() if self.parallel.collective else norm)
        factor = learning_rate_factor(self.step, len(self.batches), config.warmup_fraction, config.final_fraction)
        if math.isfinite(norm):  # a step whose gradient is not finite is skipped, and the log says so
            for group in self.optimizer.param_groups:
                group["lr"] = config.learning_rate * factor
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        matched, losses = self.parallel.summed(matched), self.parallel.summed(losses)
        self.trained += int(trained[0])
        tokens, seconds = sum(map(rows.tokens, planned)), time.monotonic() - begun
        return {
            "epoch": epoch,
            "loss": float(sum(s * v for s, v in zip(scales, losses, strict=True))),
            "learning_rate": config.learning_rate * factor,
            "gradient_norm": norm,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mb": peak_memory_mb(self.device),
            "steps": [
                {"trained": int(n), "matched": int(m), "loss_sum": float(v)}
                for n, m, v in zip(trained, matched, losses, strict=True)
            ],
        }

    def _backward(self, row: rows.Packed, scales: list[float]) -> RowCounts:
        """Add the gradients of one row's loss; its raw counts."""
        config = self.config
        self.head.train()
        with say_out_of_memory(self.device):
            with torch.autocast(self.device.type, torch.bfloat16) if self.low_precision else nullcontext():
                value, counts = self.parallel.loss(
                    self.output, row, config.ttt_steps, config.loss, scales, self.flex, config.recompute
                )
            if value.requires_grad:
                value.backward()
        return counts

    def _rehearse(self) -> None:
        """The longest planned row, all of it trained, before the first step: memory that is too small ends the run at once.

        What later steps hold besides (the optimizer's two moments) is held meanwhile; the gradients are dropped.
        """
        longest = max((pieces for _, planned in self.batches for pieces in planned), key=rows.tokens)
        row = rows.load(self.store, longest, self.device, torch.float32)
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        moments = [] if self.optimizer.state else [torch.empty_like(p) for p in parameters for _ in range(2)]
        self._backward(row._replace(loss_mask=torch.ones_like(row.loss_mask)), [1.0] * self.config.ttt_steps)
        del moments
        self.parallel.reduce()
        for parameter in self.head.parameters():
            parameter.grad = None

    def _due(self, saved: float) -> bool:
        """Whether state is to be written now; where all take part in it, as soon as it is time for one of them."""
        due = time.monotonic() - saved > self.config.checkpoint_seconds
        return bool(self.parallel.summed(torch.tensor([float(due)]))) if self.parallel.collective else due

    def evaluate(self, head: Head) -> dict[str, Any]:
        """Simulated greedy acceptance of `head` on the held-out samples, every position of the answers (see acceptance.simulate)."""
        head.eval()
        if self.greedy is None:
            self.greedy = greedy_tokens(self.held_out, self.output, self.held_out_ids)
        counted = simulate(
            self.held_out,
            head,
            self.output,
            self.config.ttt_steps,
            greedy=self.greedy,
            sample_ids=self.held_out_ids,
        )
        return summarize(counted, seed=self.config.seed)

    def _select(self, board: Any) -> None:
        head = self.parallel.whole()
        if self.rank:
            return
        found = self.evaluate(head)
        self.metrics.add(step=self.step, evaluation=found)
        board.add_scalar("held_out/acceptance_length", found["acceptance_length"], self.step)
        if found["acceptance_length"] > self.best["acceptance_length"]:
            self.best = {**found, "step": self.step}
            note = {
                "step": self.step,
                "simulated_acceptance_length": found["acceptance_length"],
                "loss": self.config.loss,
            }
            dtype = self.config.head_dtype
            if dtype == "auto":
                dtype = "bfloat16" if self.low_precision else "float32"
            checkpoint.export(head, self.folder / "head", self.target, dtype=dtype, note=note)

    def _log(self, board: Any, figures: dict[str, Any]) -> None:
        self.metrics.add(step=self.step, **figures)
        for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second"):
            board.add_scalar(f"train/{name}", figures[name], self.step)
        for j, counted in enumerate(figures["steps"]):
            board.add_scalar(f"train/accuracy_step_{j}", counted["matched"] / max(1, counted["trained"]), self.step)

    def _board(self) -> Any:
        if self.rank:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.folder / "tensorboard", purge_step=self.step + 1)

    def _save(self) -> None:
        state = {
            "digest": self.digest,
            "step": self.step,
            "trained": self.trained,
            "seconds": self.seconds,
            "best": self.best,
            "data": self.data,
            **self.parallel.state(self.optimizer),
            "random": torch.get_rng_state(),
        }
        if self.rank == 0:
            self.metrics.sync()
            run_state.save(self.folder / "state", state)

    def _restore(self, state: dict[str, Any]) -> None:
        self.parallel.restore(state, self.optimizer)
        torch.set_rng_state(state["random"])
        self.step, self.trained = state["step"], state["trained"]
        self.seconds, self.best, self.data = state["seconds"], state["best"], state.get("data", {})

    def _result(self, resumed: bool) -> TrainResult:
        if self.rank == 0 and not self.best["step"]:
            raise BadInput("training: no evaluation was made, so no head was selected; give at least one evaluation.")
        return TrainResult(
            head=self.folder / "head",
            metrics=self.folder / "metrics.jsonl",
            acceptance_length=self.best["acceptance_length"],
            interval=self.best.get("interval", [0.0, 0.0]),
            per_position=self.best.get("per_position", []),
            best_step=self.best["step"],
            steps=self.step,
            trained_tokens=self.trained,
            data=self.data,
            seconds=self.seconds,
            parameters=sum(p.numel() for p in self.head.parameters()),
            trainable_parameters=sum(p.numel() for p in self.head.parameters() if p.requires_grad),
            resumed=resumed,
        )
