"""The head's shape: Kimi-width sizes, RoPE forms, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from heads import toy_config

from kimi_eagle.eagle3.attention import MlaAttention, Rotary
from kimi_eagle.eagle3.config import for_target, rope_of
from kimi_eagle.eagle3.model import Head
from kimi_eagle.errors import BadInput

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
KIMI = SimpleNamespace(
    name="kimi",
    num_layers=61,
    hidden_size=7168,
    vocab_size=163840,
    text_config={
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 262144,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)


def test_kimi_width_sizes_are_those_of_the_published_heads():
    mla = for_target(KIMI, "mla")
    assert mla.core_parameters() == pytest.approx(0.667e9, rel=0.001)
    assert mla.parameters() == pytest.approx(1.84e9, rel=0.002)
    llama = for_target(KIMI, "llama", intermediate_size=12288)
    assert llama.core_parameters() == pytest.approx(0.83e9, rel=0.002)
    assert llama.parameters(with_embedding=True) == pytest.approx(3.18e9, rel=0.002)
    assert mla.bytes("bfloat16") == 2 * mla.parameters()
    assert mla.layer_ids == (2, 30, 58) and mla.max_position_embeddings == 262144


@pytest.mark.parametrize("attention", ["llama", "mla"])
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"q_lora_rank": None}])
def test_counted_parameters_are_those_of_the_model(attention, flags):
    config = toy_config(attention, **flags)
    d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    head = Head(config, torch.zeros(config.vocab_size, config.hidden_size), d2t)
    assert config.parameters() == sum(p.numel() for p in head.parameters())


def test_an_mla_head_needs_an_mla_target():
    llama = SimpleNamespace(
        name="l",
        num_layers=8,
        hidden_size=16,
        vocab_size=32,
        text_config={"num_attention_heads": 2, "intermediate_size": 32},
    )
    with pytest.raises(BadInput, match="no latent attention"):
        for_target(llama, "mla")


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_vocab_size": 33},
        {"layer_ids": (3, 2, 1)},
        {"layer_ids": ()},
        {"num_kv_heads": 3},
        {"norm_before_fc": True, "fc_norm": True},
        {"rope_parameters": {"rope_type": "longrope"}},
    ],
    ids=lambda w: "-".join(w),
)
def test_a_head_that_no_server_could_load_is_refused(wrong):
    with pytest.raises(BadInput):
        toy_config(**wrong)


def test_rope_is_read_from_old_and_new_keys_alike():
    old = rope_of({"rope_theta": 50000.0, "rope_scaling": YARN})
    new = rope_of(
        {
            "rope_parameters": {"rope_theta": 50000.0, "rope_type": "yarn"}
            | {k: v for k, v in YARN.items() if k != "type"}
        }
    )
    assert old == new and old["rope_type"] == "yarn"
    assert rope_of({}) == {"rope_type": "default", "rope_theta": 10000.0}


def test_yarn_slows_the_low_frequencies_by_its_factor_and_keeps_the_high_ones():
    plain = Rotary(64, {"rope_type": "default", "rope_theta": 50000.0}, deepseek=False).inverse_frequencies
    yarn = Rotary(64, rope_of({"rope_theta": 50000.0, "rope_scaling": YARN | {"beta_fast": 32.0}}), deepseek=False)
    ratio = plain / yarn.inverse_frequencies
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(64.0)
    assert yarn.magnitude == pytest.approx(0.1 * torch.log(torch.tensor(64.0)).item() + 1)


def test_deepseek_yarn_moves_the_magnitude_into_the_softmax_scale():
    config = for_target(KIMI, "mla")
    with torch.device("meta"):
        attention = MlaAttention(config)
    magnitude = 0.1 * torch.log(torch.tensor(64.0)).item() + 1
    assert attention.scale == pytest.approx(192**-0.5 * magnitude**2)
    assert attention.rotary.magnitude == pytest.approx(1.0)


def test_rotation_keeps_relative_positions_in_both_styles():
    for deepseek in (False, True):
        rotary = Rotary(8, {"rope_type": "default", "rope_theta": 100.0}, deepseek)
        q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

        def score(i, j, rotary=rotary, q=q, k=k):
            turned = [rotary.rotate(x, rotary.tables(torch.tensor([at]))) for x, at in ((q, i), (k, j))]
            return float((turned[0] * turned[1]).sum())

        assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
        assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
