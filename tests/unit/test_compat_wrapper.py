"""Delegation from a wrapper to its inner language model, on stubs of every shape that vLLM has."""

from typing import ClassVar, Protocol, runtime_checkable

import pytest

from kimi_eagle.compat import wrapper


@runtime_checkable
class NewProtocol(Protocol):
    has_own_lm_head: bool = False
    supports_eagle3: ClassVar[bool] = True

    def set_aux_hidden_state_layers(self, layers): ...

    def get_eagle3_default_aux_hidden_state_layers(self): ...


class Bare:
    def __init__(self, count=8):
        self.layers = list(range(count))


class Inner:
    def __init__(self):
        self.model = Bare()
        self.asked = None

    def set_aux_hidden_state_layers(self, layers):
        self.asked = layers


def make_wrapper():
    class Outer:
        def __init__(self):
            self.language_model = Inner()

    return Outer


def test_a_stub_wrapper_implements_the_protocol_by_asking_its_inner_model():
    outer_class = make_wrapper()
    assert not isinstance(outer_class(), NewProtocol)
    added = wrapper.delegate(outer_class, NewProtocol)
    outer = outer_class()
    assert isinstance(outer, NewProtocol) and set(added) == {
        "supports_eagle3", "has_own_lm_head", "set_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers",
    }  # fmt: skip
    outer.set_aux_hidden_state_layers((2, 4, 5))
    assert outer.language_model.asked == (2, 4, 5)
    assert outer.get_eagle3_default_aux_hidden_state_layers() == (2, 4, 5)
    assert not hasattr(outer_class, "model")


def test_delegation_twice_is_once_and_is_taken_back():
    outer_class = make_wrapper()
    before = set(vars(outer_class))
    wrapper.delegate(outer_class, NewProtocol, expose_model=True)
    assert wrapper.delegate(outer_class, NewProtocol, expose_model=True) == []
    assert outer_class().model.layers == list(range(8))
    wrapper.undelegate(outer_class)
    assert set(vars(outer_class)) == before and not isinstance(outer_class(), NewProtocol)


def test_a_wrapper_that_delegates_already_is_left_alone():
    outer_class = make_wrapper()
    outer_class.set_aux_hidden_state_layers = own = lambda self, layers: "own"
    outer_class.get_eagle3_default_aux_hidden_state_layers = lambda self: (1, 2, 3)
    assert set(wrapper.delegate(outer_class, NewProtocol)) == {"supports_eagle3", "has_own_lm_head"}
    assert outer_class.set_aux_hidden_state_layers is own
    assert outer_class().get_eagle3_default_aux_hidden_state_layers() == (1, 2, 3)


def test_language_model_by_method_by_attribute_and_bare_model_in_any_depth():
    outer = make_wrapper()()
    assert wrapper.language_model(outer) is outer.language_model
    assert wrapper.bare_model(outer) is outer.language_model.model

    class ByMethod:
        def __init__(self):
            self.hidden = Inner()

        def get_language_model(self):
            return self.hidden

    assert wrapper.bare_model(ByMethod()).layers

    class Direct:  # vLLM 0.15's Kimi wrapper: language_model is the bare model itself
        def __init__(self):
            self.language_model = Bare(4)

    assert wrapper.default_ids(Direct()) == (2, 2, 1)
    plain = Inner()
    assert wrapper.language_model(plain) is plain and wrapper.bare_model(plain) is plain.model


def test_no_layers_anywhere_is_an_error_with_the_class_name():
    class Empty:
        pass

    with pytest.raises(AttributeError, match="Empty holds no module with layers"):
        wrapper.bare_model(Empty())


def test_an_inner_model_that_would_drop_the_states_refuses_ids():
    inner = Inner()
    wrapper.no_auxiliary_states(inner, ())
    with pytest.raises(RuntimeError, match="hands out no auxiliary states"):
        wrapper.no_auxiliary_states(inner, (2, 4))
