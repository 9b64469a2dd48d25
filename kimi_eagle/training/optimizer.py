"""The optimizer and its learning-rate schedule."""

import math

import torch

from kimi_eagle.eagle3.model import Head
from kimi_eagle.training.settings import TrainConfig

BETAS = (0.9, 0.95)  # as EAGLE's reference code; the shorter second memory suits runs of few steps


def make_optimizer(head: Head, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all trained parameters; norms are never decayed. (Muon was tried: slower per step and worse at equal epochs.)"""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)


def learning_rate_factor(step: int, total: int, warmup_fraction: float, final_fraction: float) -> float:
    """Share of the peak rate at `step` of `total` (0-based): linear warm-up, then a cosine down to `final_fraction`."""
    warmup = max(1, round(total * warmup_fraction))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2
