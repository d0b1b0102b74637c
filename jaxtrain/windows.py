"""Which layers see a sliding window of the tokens before them, and which see all. No jax: FLOP counts read it."""

import dataclasses

from jaxtrain.config import Model

LOCAL, GLOBAL = "l", "g"


def kinds(model: Model) -> str:
    """A letter for each layer, LOCAL or GLOBAL: model.attention_pattern, repeated and cut to model.num_layers."""
    if not model.sliding_window:
        return GLOBAL * model.num_layers
    pattern = model.attention_pattern or LOCAL
    return (pattern * -(-model.num_layers // len(pattern)))[: model.num_layers]


def window(model: Model, kind: str) -> int:
    """Positions that a token sees in a layer of this kind, itself included; 0: all before it."""
    return model.sliding_window if kind == LOCAL else 0


def pattern_of(kinds: str) -> str:
    """The shortest pattern that repeats to these letters; the inverse of `kinds`."""
    return next(kinds[:n] for n in range(1, len(kinds) + 1) if (kinds[:n] * len(kinds))[: len(kinds)] == kinds)


def layers_by_kind(model: Model) -> list[tuple[str, int]]:
    """Each kind that the model has, and how many of its layers are of it."""
    letters = kinds(model)
    return [(kind, letters.count(kind)) for kind in dict.fromkeys(letters)]


def all_of(model: Model, kind: str) -> Model:
    """The model with all its layers of one kind."""
    return dataclasses.replace(model, sliding_window=window(model, kind), attention_pattern="")
