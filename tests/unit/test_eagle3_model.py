"""The head's chains against a plain re-computation of what a server does, one chain at a time with a growing cache."""

import pytest
import torch
from heads import A, H, V, toy_config, toy_head

from kimi_eagle.eagle3.model import document_positions, start, training_origins

VARIANTS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
        }
    },
]


def served_chain(head, aux, tokens, origin, fed):
    """Normed outputs of one chain: prefill of positions 0..origin, then one token at a time, keys appended to a cache."""
    layer, attention = head.layers[0], head.layers[0].self_attn
    positions = torch.arange(origin + 1)
    inputs, residual = layer.inputs(head.embed(tokens[1 : origin + 2]), head.combine(aux[: origin + 1]))
    keys, values = attention.keys_values(inputs, positions)
    inputs, residual, position = inputs[-1:], residual[-1:], positions[-1:]
    outputs = []
    for step in range(len(fed) + 1):
        q = attention.queries(inputs, position)[0]  # [h, D]
        groups = q.shape[0] // keys.shape[1]
        k, v = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)  # [n, h, D]
        weights = (torch.einsum("hd,nhd->hn", q, k) * attention.scale).softmax(-1)
        stream = layer.outputs(torch.einsum("hn,nhd->hd", weights, v).reshape(1, -1), residual)
        outputs.append(head.norm(stream))
        if step == len(fed):
            return torch.cat(outputs)
        state = outputs[-1] if head.config.norm_output else stream
        position = position + 1
        inputs, residual = layer.inputs(head.embed(fed[step : step + 1]), state)
        k, v = attention.keys_values(inputs, position)
        keys, values = torch.cat((keys, k)), torch.cat((values, v))


@pytest.mark.parametrize("attention", ["llama", "mla"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
def test_unrolled_training_equals_the_served_chain_from_every_origin(attention, variant):
    if attention == "mla" and "norm_before_fc" in variant:
        pytest.skip("vLLM's MLA head has no norm_before_fc")
    head = toy_head(toy_config(attention, **variant)).double()
    tokens, aux = torch.randint(0, V, (9,)), torch.randn(9, A, H, dtype=torch.float64)
    chain = start(head, aux, tokens)
    got = [chain.hidden]
    got += [chain.advance(tokens[(torch.arange(8) + 1 + step).clamp(max=8)]).hidden for step in (1, 2, 3)]
    for origin in range(5):
        expected = served_chain(head, aux, tokens, origin, tokens[origin + 2 : origin + 5])
        torch.testing.assert_close(torch.stack([g[origin] for g in got]), expected, rtol=2e-5, atol=2e-5)


def test_documents_of_a_packed_row_do_not_see_each_other():
    """T62. Positions restart with every text of a row, and no text attends to another."""
    head = toy_head(toy_config()).double()
    tokens, aux = torch.randint(0, V, (12,)), torch.randn(12, A, H, dtype=torch.float64)
    documents = torch.tensor([0] * 5 + [1] * 7)
    origins = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 10])
    packed = start(head, aux, tokens, documents, origins)
    packed.advance(tokens[(origins + 2).clamp(max=11)])
    alone = start(head, aux[5:], tokens[5:])
    alone.advance(tokens[5:][(torch.arange(6) + 2).clamp(max=6)])
    torch.testing.assert_close(packed.hidden[4:], alone.hidden, rtol=2e-5, atol=2e-5)
    assert document_positions(documents).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]


def test_state_token_label_table_on_a_row_of_eight_tokens():
    """3 prompt and 5 answer tokens: (state of, token fed, label) per step, exactly as the table in model.py says."""
    documents, mask = torch.zeros(8, dtype=torch.long), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    table = {
        step: [
            (t, t + 1 + step, t + 2 + step)
            for t in training_origins(documents, mask, step).nonzero().squeeze(1).tolist()
        ]
        for step in range(3)
    }
    assert table[0] == [(1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7)]
    assert table[1] == [(0, 2, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6), (4, 6, 7)]
    assert table[2] == [(0, 3, 4), (1, 4, 5), (2, 5, 6), (3, 6, 7)]
    assert sorted(label for _, _, label in table[0]) == [
        3,
        4,
        5,
        6,
        7,
    ]  # every answer token is supervised, nothing else


def test_labels_never_cross_into_the_next_document():
    documents, mask = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    assert training_origins(documents, mask, 0).nonzero().squeeze(1).tolist() == [0, 3]
    assert not training_origins(documents, mask, 1).any()


def test_next_token_matters_and_later_tokens_do_not():
    head = toy_head(toy_config()).double()
    tokens, aux = torch.arange(6), torch.randn(6, A, H, dtype=torch.float64)
    before = start(head, aux, tokens).hidden
    changed = tokens.clone()
    changed[3] = 20
    after = start(head, aux, changed).hidden
    same = (before == after).all(-1).tolist()
    assert same == [True, True, False, False, False]  # token 3 is fed at origin 2; origins 0 and 1 cannot know it


def test_draft_tokens_are_target_ids():
    """T49. What a chain drafts is mapped back before it is fed or compared."""
    head = toy_head(toy_config())
    hidden = torch.randn(7, H)
    draft_ids = head.lm_head(hidden).argmax(-1)
    assert head.draft_tokens(hidden).tolist() == [head.target_ids.tolist()[i] for i in draft_ids]
    assert 0 not in head.target_ids and 9 not in head.target_ids


@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_recomputed_steps_give_the_same_loss_and_gradients_and_hold_less(attention):
    """T64. One step with and without recomputation: equal loss and gradients, and half of what was kept is gone."""
    tokens, aux = torch.randint(0, V, (24,)), torch.randn(24, A, H)
    found = []
    for recompute in (False, True):
        head, held = toy_head(toy_config(attention)), []
        keep = lambda tensor, held=held: held.append(tensor.nbytes) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chain = start(head, aux, tokens, recompute=recompute)
            total = head.lm_head(chain.hidden).logsumexp(-1).sum()
            for step in (1, 2):
                chain.advance(tokens[(torch.arange(23) + 1 + step).clamp(max=23)])
                total = total + head.lm_head(chain.hidden).logsumexp(-1).sum()
        total.backward()
        found.append((total.detach(), {n: p.grad for n, p in head.named_parameters()}, sum(held)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(g is not None and g.abs().sum() > 0 for g in found[0][1].values())
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    assert found[1][2] < found[0][2] / 2


@torch.no_grad()  # PyTorch has its backward on GPUs alone
@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_flex_attention_gives_what_dense_attention_gives(attention):
    head = toy_head(toy_config(attention))
    tokens, aux, documents = torch.randint(0, V, (12,)), torch.randn(12, A, H), torch.tensor([0] * 5 + [1] * 7)
    origins = torch.arange(12)
    chains = [start(head, aux, tokens, documents, origins, flex=flex) for flex in (False, True)]
    for step in range(3):
        torch.testing.assert_close(chains[1].hidden, chains[0].hidden, rtol=1e-4, atol=1e-5)
        for chain in chains:
            chain.advance(tokens[(origins + 2 + step).clamp(max=11)])
