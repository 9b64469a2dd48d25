"""Delegation on vLLM's own wrapper classes: Kimi-K2.5 delegates by itself in this release, Kimi-VL does not until patched."""

import pytest

pytest.importorskip("vllm")

import torch

from kimi_eagle import compat

PATCH = "vllm-kimi-vl-eagle3"


class Inner(torch.nn.Module):
    """Stands for the causal language model: records the ids it is given."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(8))
        self.asked = None

    def embed_input_ids(self, ids):
        return ids

    def set_aux_hidden_state_layers(self, layers):
        self.asked = layers


def instance(cls):
    """The class around a stub, without its `__init__` (which wants a whole vLLM configuration)."""
    outer = object.__new__(cls)
    torch.nn.Module.__init__(outer)
    outer.language_model = Inner()
    outer._language_model_names = ["language_model"]
    return outer


def test_kimi_vl_answers_eagle3_only_when_patched():
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.kimi_vl import KimiVLForConditionalGeneration

    compat.undo(PATCH)
    outer = instance(KimiVLForConditionalGeneration)
    assert not supports_eagle3(outer)
    compat.apply(PATCH)
    assert supports_eagle3(outer)
    outer.set_aux_hidden_state_layers((2, 4, 5))
    assert outer.language_model.asked == (2, 4, 5)
    assert outer.get_eagle3_default_aux_hidden_state_layers() == (2, 4, 5)
    compat.undo(PATCH)
    assert not supports_eagle3(outer)


def test_a_wrapper_that_delegates_already_is_left_alone():
    from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3
    from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration

    from kimi_eagle.compat import wrapper

    assert supports_eagle3(instance(KimiK25ForConditionalGeneration))
    assert wrapper.delegate(KimiK25ForConditionalGeneration, SupportsEagle3) == []
    wrapper.undelegate(KimiK25ForConditionalGeneration)
    states = {r["id"]: r["state"] for r in compat.compat_rows()}
    assert states["vllm-kimi-eagle3"] == "not needed"
