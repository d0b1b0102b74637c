"""Loss on held-out text."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.context import Context
from jaxtrain.loss import Batch
from jaxtrain.models.module import Params
from jaxtrain.step import place_batch, rows_here
from jaxtrain.waiting import Unwanted, wait_for


def evaluate(
    eval_step: Any,
    params: Params,
    batches: Any,
    abstract: Batch,
    context: Context,
    sequences: int,
    unwanted: Callable[[], bool] = lambda: False,
) -> float | None:
    """Returns the mean loss in nats per predicted token over the first `sequences` sequences of a source.

    They are the same at every call and in every layout: rows of the last batch beyond them are padding. None once `unwanted()`
    is true, which is asked for each batch.

    eval_step: compiled, see step.make_eval_step. batches: the data interface, with `.batch(i)` of as many rows as `abstract`
    has. The sums are added up in float64 on the host, so the result does not depend on the order of arrival.
    """
    rows, size = rows_here(abstract), abstract["tokens"].shape[1]
    made = []
    for i in range(-(-sequences // size)):
        if unwanted():
            return None
        fetch = functools.partial(batches.batch, i, *([] if rows is None else [np.asarray(rows)]))
        try:
            host = wait_for(fetch, unwanted, "held-out data")
        except Unwanted:
            return None
        host = _without(host, (i * size + np.arange(size) if rows is None else i * size + np.asarray(rows)) >= sequences)
        made.append(eval_step(params, place_batch(host, abstract, context, rows)))
    sums = []
    for one in made:
        if unwanted():
            return None
        sums.append(tuple(map(float, one)))
    loss, weight = (math.fsum(s[k] for s in sums) for k in (0, 1))
    return loss / weight if weight else math.nan


def _without(host: dict[str, np.ndarray], row_R: np.ndarray) -> dict[str, np.ndarray]:
    """A batch with these rows, bool (R,), as padding: of weight 0, and of no document."""
    if not row_R.any():
        return host
    return host | {name: np.where(row_R[:, None], 0, host[name]) for name in ("weights", "segments", "positions")}


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """A loss that does not depend on the tokenizer; None where the bytes behind a token are not known."""
    return loss / math.log(2) / bytes_per_token if bytes_per_token else None


def perplexity(loss: float) -> float:
    """exp(loss): among how many equally likely tokens the model is, so to speak, in doubt."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
