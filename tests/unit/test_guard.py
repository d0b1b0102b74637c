"""guard.judge, by hand: which steps are taken, which are skipped, and the state for the next step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.step import guard
from jaxtrain.train.divergence import SkipCounter, SkippedStep

judge = jax.jit(guard.judge, static_argnums=3)
SIGMAS = 8.0


def verdict_of(state, loss, norm=1.0, sigmas=SIGMAS):
    verdict, after = judge(state, jnp.float32(loss), jnp.float32(norm), sigmas)
    return int(verdict), after


def judged(losses, sigmas=SIGMAS, norm=1.0):
    """Return the guard after steps with these losses, and its verdicts."""
    state, verdicts = guard.init_guard(), []
    for loss in losses:
        verdict, state = verdict_of(state, loss, norm, sigmas)
        verdicts.append(verdict)
    return state, verdicts


@pytest.mark.parametrize(("taken", "verdict"), [(31, guard.TAKEN), (32, guard.SPIKE), (300, guard.SPIKE)])
def test_a_spike_needs_32_steps_to_compare_with(taken, verdict):
    assert judged([1.0] * taken + [9.0])[1][-1] == verdict


@pytest.mark.parametrize("steps", [32, 33, 128, 200])
@pytest.mark.parametrize("value", ["loss", "norm"])
def test_the_limit_follows_from_the_lower_median_of_the_window(steps, value):
    losses = np.random.default_rng(steps).normal(5.0, 1.0, steps).astype(np.float32)
    state, _ = judged(losses, sigmas=0.0)
    if value == "norm":
        state = state | {"losses": state["norms"], "norms": state["losses"]}
    window = np.sort(losses[-guard.WINDOW :])
    middle = (len(window) - 1) // 2
    median = window[middle]
    spread = np.sort(np.abs(window - median))[middle]
    limit = median + 3.0 * max(guard.SIGMA * spread, guard.FLAT * abs(median))
    for factor, verdict in ((0.999, guard.TAKEN), (1.001, guard.SPIKE)):
        assert verdict_of(state, **{"loss": 1.0, "norm": 1.0, value: limit * factor}, sigmas=3.0)[0] == verdict


def counts(state):
    return {name: int(state[name]) for name in ("taken", "skipped", "in_a_row", "held")}


def test_counts_through_a_spike_a_held_step_and_a_nan():
    state, _ = judged([1.0] * 40)
    verdict, spiked = verdict_of(state, 99.0)
    assert verdict == guard.SPIKE
    assert counts(spiked) == {"taken": 40, "skipped": 1, "in_a_row": 1, "held": 1}
    assert (spiked["losses"] == state["losses"]).all(), "a skipped loss is no measure for others"
    verdict, held = verdict_of(spiked, 1.0)
    assert verdict == guard.HELD and counts(held) == counts(spiked)
    for loss, norm in ((np.nan, 1.0), (1.0, np.inf)):
        verdict, bad = verdict_of(guard.release(held), loss, norm)
        assert verdict == guard.NOT_FINITE
        assert counts(bad) == {"taken": 40, "skipped": 2, "in_a_row": 2, "held": 1}
    verdict, fine = verdict_of(guard.release(bad), 1.0)
    assert verdict == guard.TAKEN
    assert counts(fine) == {"taken": 41, "skipped": 2, "in_a_row": 0, "held": 0}


def test_without_a_limit_every_finite_step_is_taken():
    assert set(judged([1.0] * 40 + [1e9], sigmas=0.0)[1]) == {guard.TAKEN}


def test_losses_that_stand_still_may_change_by_a_hundredth_for_each_sigma():
    assert judged([2.0] * 40 + [2.0 * 1.07])[1][-1] == guard.TAKEN
    assert judged([2.0] * 40 + [2.0 * 1.09])[1][-1] == guard.SPIKE
    of_norms, _ = judged([1.0] * 40, norm=5.0)
    assert [verdict_of(of_norms, 1.0, norm)[0] for norm in (5.3, 5.5)] == [guard.TAKEN, guard.SPIKE]


def test_so_many_skipped_steps_in_a_row_are_a_divergence():
    bads = SkipCounter(in_a_row=1, skipped=4, most=3)  # one of them was skipped by an earlier attempt
    bad = SkippedStep(7, guard.SPIKE, 9.0, 1.0, (6,), (3072, 3584))
    assert [bads.add(bad), bads.add(bad)] == [False, True]
    bads.note_applied()
    assert [bads.add(bad), bads.add(bad), bads.add(bad)] == [False, False, True]
    assert (bads.in_a_row, bads.skipped, len(bads.row)) == (3, 9, 3)
