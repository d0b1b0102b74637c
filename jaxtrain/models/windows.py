"""The layers with a sliding window, and the layers with full attention. Imports no jax, because FLOP counts use this module."""

import dataclasses

from jaxtrain.config.schema import DELTA, LOCAL, Model


def window(model: Model, kind: str) -> int:
    """Return the number of positions that a token attends to in a layer of this kind, its own included; 0: no limit."""
    return model.sliding_window if kind == LOCAL else 0


def pattern_of(kinds: str) -> str:
    """Return the shortest pattern that repeats to these letters; the inverse of `Model.kinds`."""
    return next(kinds[:n] for n in range(1, len(kinds) + 1) if (kinds[:n] * len(kinds))[: len(kinds)] == kinds)


def layers_by_kind(model: Model) -> list[tuple[str, int]]:
    """Return (kind, number of layers) of each kind of softmax attention that the model has."""
    letters = model.kinds.replace(DELTA, "")
    return [(kind, letters.count(kind)) for kind in dict.fromkeys(letters)]


def with_kind(model: Model, kind: str) -> Model:
    """Return the model's config with all layers changed to this kind."""
    return dataclasses.replace(model, sliding_window=window(model, kind), attention_pattern="")
