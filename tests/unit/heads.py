"""Toy heads and rows for the tests of eagle3, training and acceptance: small widths, fixed seeds."""

from types import SimpleNamespace

import torch

from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.eagle3.model import Head

V, H, A = 32, 16, 3


def toy_config(attention: str = "llama", **overrides) -> HeadConfig:
    """A head of width 16 over 32 target and 20 draft tokens."""
    fields = dict(
        attention=attention,
        hidden_size=H,
        target_hidden_size=H,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        vocab_size=V,
        draft_vocab_size=20,
        layer_ids=(1, 2, 3),
    )
    if attention == "mla":
        fields |= dict(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        fields |= dict(head_dim=10, num_kv_heads=4)
    return HeadConfig(**(fields | overrides))


def toy_head(config: HeadConfig, seed: int = 0) -> Head:
    """Random weights, norms included; draft ids stand for every target id from 5 on but two."""
    torch.manual_seed(seed)
    kept = torch.tensor([i for i in range(V) if i not in (0, 9)])[: config.draft_vocab_size]
    d2t = kept - torch.arange(len(kept)) if config.has_map else None
    head = Head(config, torch.randn(V, config.hidden_size), d2t)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    return head


def toy_row(length: int, answer_from: int, seed: int = 0, sample_id: str = "a") -> SimpleNamespace:
    """A stored row: random tokens and states, the answer from index `answer_from` on."""
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        sample_id=sample_id,
        token_ids=torch.randint(0, V, (length,), generator=generator).int(),
        loss_mask=torch.arange(length) >= answer_from,
        hidden_states=torch.randn(length, A + 1, H, generator=generator),
    )


class ToyStore:
    """Rows in memory, read like a hidden-state store."""

    def __init__(self, *rows):
        self.rows = {row.sample_id: row for row in rows}
        self.sample_ids = list(self.rows)

    def row(self, sample_id):
        return self.rows[sample_id]
