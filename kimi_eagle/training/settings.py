"""The settings of a training run and what it returns."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_eagle import paths
from kimi_eagle.eagle3.loss import LOSSES
from kimi_eagle.errors import BadInput

LENGTH = "tokens per target forward, bonus included"


class TrainConfig(BaseModel):
    """Everything that decides a training run; two runs with equal settings and machine take the same steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(description="target name or checkpoint folder")
    train_store: Path = Field(description="hidden-state store to train on")
    held_out_store: Path = Field(description="hidden-state store whose simulated acceptance selects the head")
    vocab_map: Path | None = Field(None, description="vocab_map.safetensors; None: the target's whole vocabulary")
    folder: Path = Field(description="where head/, metrics.jsonl, tensorboard/ and the run's state go")
    head_attention: Literal["llama", "mla"] = "llama"
    ttt_steps: int = Field(3, ge=1, le=16, description="steps a chain is unrolled for")
    loss: str = Field("kl", description=f"one of {', '.join(LOSSES)}")
    step_decay: float = Field(1.0, gt=0, le=1, description="weight of step j is step_decay ** j")
    learning_rate: float = Field(1e-3, gt=0, description="peak, after warm-up")
    final_fraction: float = Field(0.05, ge=0, le=1, description="the cosine ends at this share of the peak")
    epochs: int = Field(3, ge=1)
    row_tokens: int = Field(512, ge=16, description="tokens of a packed row")
    batch_rows: int = Field(2, ge=1, description="rows per optimizer step and process")
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="share of the steps that warm up linearly")
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    initial: Literal["target", "random"] = Field(
        "target", description="decoder layer from the target's last, or random"
    )
    initial_head: Path | None = Field(
        None, description="head to start from, in any format that check knows, e.g. a published one"
    )
    train_lm_head: bool = Field(False, description="False keeps the target's rows, which saves a third of its cost")
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    evaluation_samples: int = Field(32, ge=1, description="held-out samples simulated per evaluation")
    evaluations: int = Field(0, ge=0, description="evaluations over the run; 0: one an epoch")
    checkpoint_seconds: float = Field(60.0, gt=0, description="state is written when this long has passed")
    head_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 from a CPU, else bfloat16"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the products; master weights are float32; auto: float32 on a CPU, else bfloat16"
    )
    attention: Literal["auto", "dense", "flex"] = Field(
        "auto", description="auto: flex for rows above 1024 tokens on a GPU"
    )
    recompute: bool = Field(
        False,
        description="compute each unrolled step again in the backward pass: less memory, more time, the same gradients",
    )
    device: str = Field("auto", description="auto, cpu or cuda")
    seed: int = 0
    parallel: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="processes each hold the whole head, or (fsdp2) shares of its weights, gradients and moments"
    )
    nproc: int = Field(1, ge=1, description="processes (torchrun); more than one needs as many devices, or the CPU")

    @classmethod
    def of(cls, **values: Any) -> "TrainConfig":
        """A checked configuration; BadInput says in one sentence what is wrong."""
        try:
            made = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadInput(
                f"training: {'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r})."
            ) from None
        if made.loss not in LOSSES:
            raise BadInput(f"training: loss {made.loss!r} is none of {', '.join(LOSSES)}.")
        return made

    def digest(self) -> str:
        """Digest of what decides the steps; where the files lie, how often state is written and what is recomputed do not."""
        left_out = {"folder", "train_store", "held_out_store", "vocab_map", "checkpoint_seconds", "recompute"}
        kept = self.model_dump(mode="json", exclude=left_out)
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


class TrainResult(BaseModel):
    """What a run leaves: the selected head and the figures behind the choice."""

    head: Path
    metrics: Path
    acceptance_length: float = Field(description="simulated, greedy, every position of the held-out answers")
    interval: list[float]
    per_position: list[dict[str, int]]
    best_step: int
    steps: int
    trained_tokens: int = Field(description="trained label positions of step 0, summed over the epochs")
    data: dict[str, bool | int | float] = Field({}, description="of the training store, from data_facts")
    seconds: float = Field(description="wall time of all sessions of this run")
    parameters: int = Field(description="parameters of the head, shared embedding excluded")
    trainable_parameters: int
    resumed: bool

    def figures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Figures and units for a stage's result.json."""
        figures = {
            "acceptance": {
                "simulated_length": self.acceptance_length,
                "interval": self.interval,
                "per_position": self.per_position,
            },
            "steps": {"taken": self.steps, "best": self.best_step},
            "trained_tokens": self.trained_tokens,
            "data": self.data,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": self.trained_tokens / self.seconds if self.seconds else 0.0,
            "parameters": {"head": self.parameters, "trained": self.trainable_parameters},
        }
        units = {
            "acceptance": {"simulated_length": LENGTH, "interval": LENGTH, "per_position": "draft tokens"},
            "steps": "optimizer steps",
            "trained_tokens": "labels of step 0, over all epochs",
            "data": {
                "samples": "samples",
                "own_answers": "true/false",
                "surprise_nats": "nats",
                "entropy_nats": "nats",
            },
            "seconds": "s",
            "tokens_per_second": "labels of step 0 per s",
            "parameters": "parameters",
        }
        return figures, units


def for_stage(cfg: Any, stores: dict[str, Path], vocab_map: Path) -> TrainConfig:
    """The configuration of notebook 04: `cfg` has its parameters as attributes, `stores` the folders of train and heldout."""
    same = set(TrainConfig.model_fields) & set(vars(cfg)) - {"folder", "initial_head"}
    return TrainConfig.of(
        **{name: getattr(cfg, name) for name in same},
        train_store=stores["train"],
        held_out_store=stores["heldout"],
        vocab_map=vocab_map,
        folder=cfg.folder,
        initial=cfg.initial_weights,
        initial_head=paths.resolve(cfg.initial_head) if cfg.initial_head else None,
        device=cfg.train_device,
        nproc=cfg.train_processes,
    )
