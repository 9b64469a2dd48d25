"""vLLM's CPU rotary kernel against the native formula, per layout: wrong for several heads in three dimensions, right patched."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kimi_eagle import compat  # noqa: E402
from kimi_eagle.compat.vllm_patches import rotary_error  # noqa: E402

PATCH = "vllm-cpu-rotary"
TOKENS, HEADS, SIZE = 7, 4, 64


@pytest.fixture(params=[False, True], ids=["interleaved", "neox"])
def rope(request):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the kernel under test is the CPU's")
    compat.undo(PATCH)
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(SIZE, SIZE, 64, 10000.0, request.param, torch.float32)
    compat.undo(PATCH)


def layouts():
    """Name -> (query, key), each as a model passes them."""
    random = torch.Generator().manual_seed(0)
    wide_query = torch.randn(TOKENS, HEADS, 3 * SIZE, generator=random)
    wide_key = torch.randn(TOKENS, 1, 9 * SIZE, generator=random)
    query, key = wide_query[..., 2 * SIZE :], wide_key[..., 8 * SIZE :]
    return {
        "flat": (query.reshape(TOKENS, -1).contiguous(), key.reshape(TOKENS, -1).contiguous()),
        "heads": (query.contiguous(), key.contiguous()),
        "slices": (query, key),
        "no key": (query.contiguous(), None),
    }


def error(rope, query, key):
    """Largest difference between the kernel's path and the native one, which leave `query` and `key` as they were."""
    positions = torch.arange(TOKENS) + 3
    right = rope.forward_native(positions, query.clone(), None if key is None else key.clone())
    given = [query.clone() if query.is_contiguous() else query, key]
    got = rope.forward_cpu(positions, *given)
    return max((a - b).abs().max().item() for a, b in zip(got, right, strict=True) if b is not None)


def test_the_fault_is_there_unpatched_gone_patched_and_back_undone(rope):
    def errors():
        return {name: error(rope, *pair) for name, pair in layouts().items()}

    before = errors()
    assert before["flat"] < 1e-5, "the layout that Llama uses is right as it is"
    assert before["heads"] > 0.1 and before["slices"] > 0.1
    compat.apply(PATCH)
    assert max(errors().values()) < 1e-5
    compat.undo(PATCH)
    assert errors()["slices"] > 0.1


def test_the_patched_path_still_works_in_place(rope):
    compat.apply(PATCH)
    query, key = layouts()["slices"]
    positions = torch.arange(TOKENS)
    right = rope.forward_native(positions, query.clone(), key.clone())
    rope.forward_cpu(positions, query, key)
    assert torch.allclose(query, right[0], atol=1e-5) and torch.allclose(key, right[1], atol=1e-5)


def test_the_proof_that_workers_run_sees_the_fault(rope):
    assert rotary_error() > 0.1
    compat.apply(PATCH)
    assert rotary_error() < 1e-5
    assert compat.check([PATCH])[0]["state"] == "applied"


def test_what_stands_in_the_kernels_place_may_return_new_tensors(rope):
    """Someone sets forward_cpu = forward_native: the patch around it must not lose the rotation."""
    from kimi_eagle.compat.vllm_patches import _flat_rotary

    around = _flat_rotary(type(rope).forward_native)
    positions = torch.arange(TOKENS) + 3
    for query, key in layouts().values():
        right = rope.forward_native(positions, query.clone(), None if key is None else key.clone())
        got = around(rope, positions, query.clone(), None if key is None else key.clone())
        assert all(torch.allclose(g, r, atol=1e-6) for g, r in zip(got, right, strict=True) if r is not None)
