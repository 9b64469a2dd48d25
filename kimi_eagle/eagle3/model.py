"""The EAGLE-3 head and its chains: training unrolls exactly what the serving engine computes.

One decoder layer reads, at position t, the target's state and the *next* token (arXiv 2503.01840; vLLM's proposer shifts
the tokens and leaves the positions). With x_t the target's auxiliary states at position t, g(j) the head's own output and
the row's tokens numbered from 0, the chain that starts at origin t computes

| step | state            | token fed | RoPE position | label: the target's distribution of | from target state |
|------|------------------|-----------|---------------|--------------------------------------|-------------------|
| 0    | fc(x_t)          | t + 1     | t             | token t + 2                          | t + 1             |
| 1    | g(0) of origin t | t + 2     | t + 1         | token t + 3                          | t + 2             |
| j    | g(j-1)           | t + 1 + j | t + j         | token t + 2 + j                      | t + 1 + j         |

In training (training-time test) the fed tokens are the text's own; when serving, from step 1 on, the head's. Keys: step 0
of every position up to t of the same document, then one key of the chain's own per step. That equals the served cache,
where accepted positions are rewritten with the target's states and only the current chain's keys are the head's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kimi_eagle.eagle3.attention import LlamaAttention, MlaAttention, RMSNorm, attend, attend_flex, row_mask
from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.errors import BadInput


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), x [N, H]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer; its attention reads embedding and state side by side, its residual carries the state alone."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config) if config.attention == "llama" else MlaAttention(config)
        self.mlp = GatedMlp(H, config.intermediate_size)
        self.hidden_norm, self.input_layernorm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and state, each [N, H] -> attention input [N, 2H] and residual [N, H]."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        return torch.cat((self.input_layernorm(embedding), normed), dim=-1), residual

    def outputs(self, attention: Tensor, residual: Tensor) -> Tensor:
        """Attention result [M, h * Dv] and residual [M, H] -> the residual stream after the layer [M, H]."""
        residual = self.self_attn.o_proj(attention) + residual
        return self.mlp(self.post_attention_layernorm(residual)) + residual


class Head(nn.Module):
    """An EAGLE-3 head. Its state_dict has the checkpoint's names; the target's embedding is shared, frozen and not in it."""

    def __init__(self, config: HeadConfig, embedding: Tensor, d2t: Tensor | None = None) -> None:
        """`embedding` [V, H] of the target; `d2t` [Vd] int64 offsets, needed where the draft vocabulary is a cut."""
        super().__init__()
        self.config = config
        H, fc_input = config.hidden_size, config.num_aux * config.target_hidden_size
        self.register_buffer("embedding", embedding, persistent=False)
        if d2t is None and config.has_map:  # zeros would take draft ids for target ids, and nothing would say so
            raise BadInput(
                f"head: a draft vocabulary of {config.draft_vocab_size} of the target's {config.vocab_size} tokens needs its d2t."
            )
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if d2t is None else d2t.long()
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size) + offsets, persistent=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fc_input, config.rms_norm_eps)
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(config.num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(fc_input, H, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)

    def combine(self, aux: Tensor) -> Tensor:
        """Auxiliary states [N, A, Ht] -> state of step 0, [N, H]."""
        if self.config.fc_norm:
            aux = torch.stack([norm(a) for norm, a in zip(self.fc_norm, aux.unbind(1), strict=True)], dim=1)
        flat = aux.flatten(1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def embed(self, tokens: Tensor) -> Tensor:
        """Target token ids [N] -> their embeddings [N, H] in the head's dtype."""
        return self.embedding[tokens.long()].to(self.fc.weight.dtype)

    def draft_tokens(self, hidden: Tensor) -> Tensor:
        """Normed output [M, H] -> the arg-max draft token of each row as a *target* id [M]."""
        return self.target_ids[self.lm_head(hidden).argmax(-1)]


class Chain:
    """Chains of one packed row, all origins at once: `hidden` [M, H] is the current step's normed output."""

    def __init__(
        self,
        head: Head,
        aux: Tensor,
        tokens: Tensor,
        documents: Tensor,
        origins: Tensor,
        flex: bool = False,
        recompute: bool = False,
    ) -> None:
        """Step 0. aux [T, A, Ht], tokens [T], documents [T] (which text a token is of), origins [M]; see `start`."""
        self.head, self.attention, self.flex, self.recompute = head, head.layers[0].self_attn, flex, recompute
        positions = document_positions(documents)
        self.positions = positions[origins]
        self.own: list[tuple[Tensor, Tensor]] = []
        following = torch.cat((tokens[1:], tokens[-1:]))  # the last position of a text is never an origin
        inputs, residual = head.layers[0].inputs(head.embed(following), head.combine(aux))
        self.base = self.attention.keys_values(inputs, positions)
        if flex:
            self.mask = row_mask(documents, origins)
        else:
            at = torch.arange(len(tokens), device=tokens.device)
            self.mask = (documents[origins][:, None] == documents[None]) & (at[None] <= origins[:, None])
        self._finish(inputs[origins], residual[origins])

    def advance(self, tokens: Tensor) -> "Chain":
        """One more step, with `tokens` [M] (target ids) fed to the chains."""
        self.positions = self.positions + 1
        inputs, residual = self.head.layers[0].inputs(self.head.embed(tokens), self.fed_back)
        self.own.append(self.attention.keys_values(inputs, self.positions))
        self._finish(inputs, residual)
        return self

    def _finish(self, inputs: Tensor, residual: Tensor) -> None:
        # What a step reads is handed over, not looked up: by the backward pass the chain stands at a later step.
        given = (inputs, residual, self.positions, self.base, tuple(self.own))
        stream = checkpoint(self._stream, *given, use_reentrant=False) if self.recompute else self._stream(*given)
        self.hidden = self.head.norm(stream)
        self.fed_back = self.hidden if self.head.config.norm_output else stream

    def _stream(
        self,
        inputs: Tensor,
        residual: Tensor,
        positions: Tensor,
        base: tuple[Tensor, Tensor],
        own: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        q, scale = self.attention.queries(inputs, positions), self.attention.scale
        attention = (attend_flex if self.flex else attend)(q, base, own, self.mask, scale)
        return self.head.layers[0].outputs(attention, residual)


def start(
    head: Head,
    aux: Tensor,
    tokens: Tensor,
    documents: Tensor | None = None,
    origins: Tensor | None = None,
    flex: bool = False,
    recompute: bool = False,
) -> Chain:
    """Chains at step 0 over one packed row; positions restart at 0 in every document.

    aux [T, A, Ht] in the order of the head's layer ids, tokens [T]; documents [T] int, contiguous (None: one text);
    origins [M] ascending indices into the row (None: all but the row's last); flex: flex attention instead of dense;
    recompute: attention and MLP of every step are computed again in the backward pass instead of kept for it.
    """
    T = len(tokens)
    if documents is None:
        documents = torch.zeros(T, dtype=torch.int64, device=tokens.device)
    if origins is None:
        origins = torch.arange(T - 1, device=tokens.device)
    return Chain(head, aux, tokens, documents, origins, flex, recompute)


def document_positions(documents: Tensor) -> Tensor:
    """documents [T] (contiguous runs) -> each token's index inside its own document [T]."""
    at = torch.arange(len(documents), device=documents.device)
    starts = torch.cat((torch.ones(1, dtype=torch.bool, device=documents.device), documents[1:] != documents[:-1]))
    return at - torch.where(starts, at, 0).cummax(0).values


def training_origins(documents: Tensor, loss_mask: Tensor, step: int) -> Tensor:
    """Mask [T] of the origins whose label of `step`, token t + 2 + step, is a trained token of the same document."""
    T, reach = len(documents), step + 2
    mask = torch.zeros(T, dtype=torch.bool, device=documents.device)
    if reach < T:
        mask[: T - reach] = (documents[: T - reach] == documents[reach:]) & loss_mask[reach:]
    return mask
