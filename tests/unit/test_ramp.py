"""The ramp of the batch: sizes, sums and units of its steps, and the steps of epochs, compared with lists of all steps."""

import fractions
import itertools

import pytest
from test_refusals import TINY

from jaxtrain.config.ramp import Ramp, parse_ramp
from jaxtrain.data import loading, opening

RAMPS = {
    "": [32] * 30,
    "8:1": [8] + [32] * 29,
    "8:4,16:9": [8] * 4 + [16] * 5 + [32] * 21,
    "12:2,16:3,30:20": [12] * 2 + [16] + [30] * 17 + [32] * 10,
}


@pytest.mark.parametrize("text", RAMPS)
def test_a_step_has_the_sequences_of_its_part(text):
    sizes = RAMPS[text]
    ramp, wrong = parse_ramp(text, 32)
    assert wrong is None and str(ramp) == text
    assert [ramp.size(step) for step in range(30)] == sizes
    sums = list(itertools.accumulate(sizes, initial=0))
    assert [ramp.before(step) for step in range(31)] == sums
    assert all(size % ramp.unit == 0 for size in sizes) and ramp.size(ramp.end) == 32
    for sequences in range(1, 200):
        wanted = next(step for step, total in enumerate(sums) if total >= sequences)
        assert ramp.steps_for(sequences) == wanted
        assert ramp.steps_for(fractions.Fraction(2 * sequences - 1, 2)) == wanted
    changes = [step for step in range(30) if ramp.until(step) not in (None, ramp.until(step - 1) if step else None)]
    assert len(changes) == len(ramp.phases)


@pytest.mark.parametrize("text", ["8", "8:", ":3", "8:3,", "a:3", "8:-3", "8:3:4", "0:3", "8:0", "32:3", "8:3,8:4", "8:3,16:3"])
def test_a_wrong_text_is_no_ramp(text):
    ramp, wrong = parse_ramp(text, 32)
    assert wrong and ramp == Ramp(32)


@pytest.mark.parametrize("epochs", [0.1, 1, 2.5])
def test_the_steps_of_epochs_reach_their_tokens(epochs):
    """The last step is the first with which the run has read that many."""
    run = loading.load_config([TINY, f"--config.train.epochs={epochs}", "--config.train.batch_ramp=8:1000"]).run
    wanted, steps = epochs * opening.tokens_per_epoch(run.data, run.paths.data), run.train.steps
    assert run.tokens_before(steps - 1) < wanted <= run.tokens_before(steps)
    assert run.tokens_before(1) == 8 * run.data.seq_len


def test_a_smaller_step_has_the_microbatches_of_the_full_one():
    run = loading.load_config(
        [
            "--config=configs/tiny.py",
            *(f"--config.train.{x}" for x in ("global_batch=64", "grad_accum=4", "batch_ramp=8:2,32:4")),
        ]
    ).run
    found = [
        (run.with_batch_size(size).train.global_batch, run.with_batch_size(size).train.grad_accum) for size in (8, 16, 32, 64)
    ]
    assert found == [(8, 1), (16, 1), (32, 2), (64, 4)]
    assert run.with_batch_size(64) is run and run.with_batch_size(32).ramp == Ramp(32)
