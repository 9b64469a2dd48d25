"""Counted operations of training, and the share of the hardware's own matrix rate that they reach."""

from kimi_eagle.eagle3.config import HeadConfig


def per_token(config: HeadConfig, steps: int, mean_context: float, train_lm_head: bool = True) -> dict[str, float]:
    """Floating-point operations of one token of a packed row in training, by term; recomputation is not counted.

    A matrix of n parameters costs 2n forward and 4n backward (gradients of input and weight; 2n where the weight is frozen).
    Every step of the training-time test goes through the layer and lm_head; fc and the target's output only once.
    `mean_context`: keys that a query sees on average.
    """
    H, aux = config.hidden_size, config.num_aux * config.target_hidden_size
    out = config.draft_vocab_size * H
    fc = aux * H
    value = config.v_head_dim if config.attention == "mla" else config.head_dim
    norms = 4 * H + (aux if config.fc_norm or config.norm_before_fc else 0)
    layer = config.core_parameters() - fc - norms
    return {
        "fc": 6.0 * fc,
        "layer": 6.0 * steps * layer,
        "attention": 6.0 * steps * config.num_heads * (config.head_dim + value) * mean_context,
        "lm_head": (6.0 if train_lm_head else 4.0) * steps * out,
        "target's output": 2.0 * config.draft_vocab_size * config.target_hidden_size,
    }
