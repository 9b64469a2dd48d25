"""A toy target on disk with stored states of a predictable text, for tests that train."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kimi_eagle import vocab_map
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.target import describe
from kimi_eagle.train import TrainConfig

V, H, N = 20, 32, 8


def make_target(folder: Path) -> None:
    """A Llama-shaped checkpoint of random weights: the three outer tensors and the last decoder layer."""
    torch.manual_seed(0)
    folder.mkdir()
    text = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": N,
        "hidden_size": H,
        "vocab_size": V,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(text))
    layer = f"model.layers.{N - 1}."
    shapes = {
        "model.embed_tokens.weight": (V, H),
        "model.norm.weight": (H,),
        "lm_head.weight": (V, H),
        layer + "self_attn.q_proj.weight": (16, H),
        layer + "self_attn.k_proj.weight": (8, H),
        layer + "self_attn.v_proj.weight": (8, H),
        layer + "self_attn.o_proj.weight": (H, 16),
        layer + "mlp.gate_proj.weight": (24, H),
        layer + "mlp.up_proj.weight": (24, H),
        layer + "mlp.down_proj.weight": (H, 24),
        layer + "input_layernorm.weight": (H,),
        layer + "post_attention_layernorm.weight": (H,),
    }
    save_file(
        {n: torch.ones(s) if len(s) == 1 else torch.randn(s) for n, s in shapes.items()}, folder / "model.safetensors"
    )


def make_store(folder: Path, target, prefix: str, samples: int, seed: int) -> None:
    """Texts of a fixed cycle over the vocabulary, whose final state makes the target's arg-max the text's next token."""
    generator = torch.Generator().manual_seed(seed)
    lm_head, embedding = target.load_tensor("lm_head"), target.load_tensor("embed_tokens")
    manifest = {"layer_ids": [2, 4, 5, N], "layer_id_convention": "vllm", "hidden_size": H, "target": target.identity()}
    with StoreWriter(folder, manifest) as writer:
        for number in range(samples):
            length = int(torch.randint(6, 24, (1,), generator=generator))
            begin = int(torch.randint(0, V, (1,), generator=generator))
            tokens = (begin + 7 * torch.arange(length + 1)) % V
            final = 4 * lm_head[tokens[1:]] / lm_head[tokens[1:]].norm(dim=-1, keepdim=True)
            states = torch.stack([embedding[tokens[:-1]] * s for s in (1.0, -0.5, 0.7)] + [final], dim=1)
            writer.add(f"{prefix}{number}", tokens[:-1], torch.arange(length) >= 3, states)


def make_lab(root: Path) -> Path:
    """`root` with a target, a training and a held-out store, and a vocabulary map."""
    make_target(root / "target")
    target = describe(root / "target")
    make_store(root / "train", target, "t", 40, 1)
    make_store(root / "held", target, "h", 10, 2)
    counted = vocab_map.count_tokens(Store(root / "train"), V)
    vocab_map.build(counted, 19, tokenizer_sha256=target.tokenizer_sha256).save(root / "map")
    return root


def settings(lab: Path, folder: Path, **changes) -> TrainConfig:
    """Settings of a run in `folder` over what `make_lab` made."""
    fields = dict(
        target=str(lab / "target"),
        train_store=lab / "train",
        held_out_store=lab / "held",
        vocab_map=lab / "map" / "vocab_map.safetensors",
        folder=folder,
        row_tokens=64,
        batch_rows=2,
        epochs=6,
        learning_rate=0.02,
        device="cpu",
        train_lm_head=True,
    )
    return TrainConfig.of(**(fields | changes))


def lines(folder: Path) -> list[dict]:
    """What a run wrote into metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
