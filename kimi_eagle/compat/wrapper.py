"""Wrappers around a language model: find the inner one, and let the outer class answer EAGLE-3's questions by asking it.

A multimodal class such as KimiK25ForConditionalGeneration holds a causal model under `language_model`, which holds the bare
model with the layers under `model`. Everything here goes by attributes, so it fits any such wrapper.
"""

from collections.abc import Callable

MARK = "_kimi_eagle_delegated"


def language_model(model):
    """The causal model inside `model`: `get_language_model()`, else `.language_model`, else `model` itself."""
    if callable(getattr(model, "get_language_model", None)):
        return model.get_language_model()
    inner = getattr(model, "language_model", None)
    return model if inner is None else inner


def bare_model(model):
    """The module that holds `.layers`, however deep: through the language model and then `.model`.

    Raises AttributeError naming the class where there is none.
    """
    current, seen = language_model(model), set()
    while not hasattr(current, "layers"):
        inner = current.__dict__.get("_modules", {}).get("model") if hasattr(current, "__dict__") else None
        inner = inner if inner is not None else getattr(current, "model", None)
        if inner is None or id(inner) in seen:
            raise AttributeError(f"{type(model).__name__} holds no module with layers under language_model or model")
        seen.add(id(inner))
        current = inner
    return current


def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
    """Pass the auxiliary layer ids (vLLM's convention) to the inner model."""
    language_model(self).set_aux_hidden_state_layers(layers)


def default_ids(self) -> tuple[int, ...]:
    """EAGLE-3's default ids (2, N // 2, N - 3): the inner model's own answer where it has one."""
    inner = language_model(self)
    for name in ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers"):
        if inner is not self and callable(getattr(inner, name, None)):
            return getattr(inner, name)()
    count = len(bare_model(self).layers)
    return (2, count // 2, count - 3)


def no_auxiliary_states(self, layers: tuple[int, ...]) -> None:
    """For an inner model whose forward hands out no auxiliary states: accept none, refuse any, instead of dropping them."""
    if tuple(layers):
        raise RuntimeError(
            f"{type(self).__name__} of this vLLM hands out no auxiliary states: extract with hooks or speculators here, "
            "and serve an EAGLE-3 head with vLLM 0.18 or later."
        )


# What SupportsEagle3 asks of a class in one version or another -> what a wrapper answers.
ANSWERS: dict[str, object] = {
    "supports_eagle3": True,
    "has_own_lm_head": False,
    "has_own_embed_tokens": False,
    "set_aux_hidden_state_layers": set_aux_hidden_state_layers,
    "get_eagle3_aux_hidden_state_layers": default_ids,
    "get_eagle3_default_aux_hidden_state_layers": default_ids,
}


def asked_members(protocol: type) -> list[str]:
    """The members that a runtime-checkable protocol class asks for, of those that a wrapper can answer."""
    asked = set()
    for cls in protocol.__mro__:
        asked |= set(vars(cls)) | set(vars(cls).get("__annotations__", {}))
    return [name for name in ANSWERS if name in asked]


def delegate(cls: type, protocol: type, expose_model: bool = False) -> list[str]:
    """Give a wrapper class the members of `protocol` that it lacks, answered by its inner model; returns their names.

    With `expose_model` also a read-only `model`, the bare model, for callers that look there. A class that has a member,
    also by inheritance, keeps it; a second call adds nothing. `undelegate` takes back what this added.
    """
    added = []
    for name in asked_members(protocol):
        if not hasattr(cls, name):
            setattr(cls, name, ANSWERS[name])
            added.append(name)
    if expose_model and not hasattr(cls, "model"):
        cls.model = property(bare_model)
        added.append("model")
    setattr(cls, MARK, tuple(vars(cls).get(MARK, ())) + tuple(added))
    return added


def undelegate(cls: type) -> list[str]:
    """Take back what `delegate` added to this class; returns the names."""
    names = list(vars(cls).get(MARK, ()))
    for name in names:
        delattr(cls, name)
    if MARK in vars(cls):
        delattr(cls, MARK)
    return names


def answering(name: str) -> Callable:
    """`build` of a registry Change that adds the member `name` to a wrapper class."""
    return lambda _: ANSWERS[name]
