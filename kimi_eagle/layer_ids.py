"""Layer-id conventions, and the conversions between them: the only place that knows more than one.

In memory and on disk kimi_eagle speaks vLLM's: id k is the residual stream that *enters* decoder layer k, so 0 is the
embedding output and N (the number of layers) is the output of the last layer before the final norm.

| convention        | id k means                                  | vLLM id |
|-------------------|---------------------------------------------|---------|
| vllm              | input of layer k                            | k       |
| sglang            | output of layer k (also TorchSpec's configs)| k + 1   |
| speculators       | input of layer k (its head format, 0.9)     | k       |
| speculators-0.3   | captured after layer k                      | k + 1   |
| huggingface       | hidden_states[k]; entry N is *normed*       | k (k<N) |
"""

from collections.abc import Sequence

from kimi_eagle.errors import BadInput

OFFSET_TO_VLLM = {"vllm": 0, "sglang": 1, "speculators": 0, "speculators-0.3": 1, "huggingface": 0}


def to_vllm(ids: Sequence[int], convention: str, num_layers: int | None = None) -> list[int]:
    """Layer ids given in `convention`, as vLLM's ids, in the same order.

    `num_layers` (N) is needed for Hugging Face's, whose entry N is another tensor than vLLM's id N; BadInput where it is asked for.
    """
    _refuse_normed(ids, convention, num_layers)
    return [k + _offset(convention) for k in ids]


def from_vllm(ids: Sequence[int], convention: str, num_layers: int | None = None) -> list[int]:
    """vLLM's layer ids written in `convention`, in the same order; BadInput where it has no name for one (vLLM's 0 in SGLang).

    `num_layers` as in `to_vllm`.
    """
    _refuse_normed(ids, convention, num_layers)
    shifted = [k - _offset(convention) for k in ids]
    if any(k < 0 for k in shifted):
        raise BadInput(
            f"layer id 0 (the embeddings) has no name in the {convention} convention: leave it out of {list(ids)}."
        )
    return shifted


def meaning(ids: Sequence[int], convention: str) -> str:
    """Which tensors a reader of `convention` takes for `ids`, in words that no convention is needed to read (layers count from 0)."""
    named = ["embeddings" if k == 0 else f"output of layer {k - 1}" for k in to_vllm(ids, convention)]
    return ", ".join(named)


def default_auxiliary(num_layers: int) -> list[int]:
    """The three auxiliary ids that vLLM and EAGLE-3 take by default: 2, N // 2 and N - 3.

    Raises BadInput where a small target makes them coincide (both capture loops then return fewer states than ids).
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if len(set(ids)) < 3 or ids != sorted(ids):
        raise BadInput(
            f"a target of {num_layers} layers has no three distinct default layer ids ({ids}): set auxiliary_layers."
        )
    return ids


def checked_auxiliary(ids: Sequence[int], num_layers: int) -> list[int]:
    """`ids` (empty: the default) after checking that they ascend, differ and lie in 0..N-1; BadInput otherwise."""
    if not ids:
        return default_auxiliary(num_layers)
    chosen = [int(k) for k in ids]
    if chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise BadInput(f"auxiliary_layers {chosen}: give ascending, distinct vLLM ids between 0 and {num_layers - 1}.")
    return chosen


def _refuse_normed(ids: Sequence[int], convention: str, num_layers: int | None) -> None:
    if convention != "huggingface":
        return
    if num_layers is None or any(k >= num_layers for k in ids):
        raise BadInput(
            f"layer ids {list(ids)} of Hugging Face: its last entry (the number of layers) is taken after the final norm, vLLM's "
            "before it; give num_layers and smaller ids, and hook the last layer for the final state."
        )


def _offset(convention: str) -> int:
    if convention not in OFFSET_TO_VLLM:
        raise BadInput(f"unknown layer-id convention {convention!r}: use one of {', '.join(OFFSET_TO_VLLM)}.")
    return OFFSET_TO_VLLM[convention]
