"""Held-out loss by hand: which rows count, what a run that is asked to stop gets, and the units it is told in."""

import itertools
import math

import helpers
import numpy as np
import pytest

from jaxtrain.train import evaluate

ROWS = 8
RUN = helpers.tiny({"train.global_batch": ROWS, "data.seq_len": 16, "model.num_layers": 1})


class Rows:
    """Held-out data whose row i is made of the token i; row 3 predicts half of its tokens alone."""

    def batch(self, step, rows=None):
        numbers = step * ROWS + np.arange(ROWS)
        weights = np.ones((ROWS, 16), np.float32)
        weights[numbers == 3, 8:] = 0
        tokens = np.broadcast_to(numbers[:, None], (ROWS, 16)).astype(np.int32)
        ones = np.ones((ROWS, 16), np.int32)
        return {"tokens": tokens, "targets": tokens, "segments": ones, "positions": ones, "weights": weights}


def step(params, batch):
    """The token is the loss: the sum over rows, and the weight."""
    assert (np.asarray(batch["segments"] != 0) | (np.asarray(batch["weights"]) == 0)).all()
    return (np.asarray(batch["tokens"]) * np.asarray(batch["weights"])).sum(), np.asarray(batch["weights"]).sum()


def evaluated(sequences, unwanted=lambda: False):
    made = helpers.program(RUN)
    return evaluate.evaluate(step, None, Rows(), made.eval_batch, made.context, sequences, unwanted)


@pytest.mark.parametrize("sequences", [1, 4, 7, 8, 9, 16, 21])
def test_the_mean_is_over_predicted_tokens_of_so_many_rows(sequences):
    weights = np.where(np.arange(sequences) == 3, 8, 16)
    assert evaluated(sequences) == pytest.approx((np.arange(sequences) * weights).sum() / weights.sum())


def test_an_evaluation_is_given_up_at_the_next_batch():
    asked = itertools.count()
    assert evaluated(24, lambda: next(asked) >= 2) is None
    assert math.isnan(evaluated(0)), "of no rows"


def test_units():
    assert evaluate.bits_per_byte(2 * math.log(2), 4.0) == 0.5
    assert evaluate.bits_per_byte(1.0, None) is None
    assert evaluate.perplexity(math.log(7)) == pytest.approx(7)
    assert evaluate.perplexity(1e6) == math.inf
