"""Skip steps whose loss or gradient norm is not finite, or far above the values of the last applied steps.

The compiled step itself decides whether it is skipped, from numbers that are the same on every device. The guard is part of the
train state, so a resumed run skips the same steps as an uninterrupted run. A skipped step leaves parameters and moments
unchanged, bit for bit.

The step after a skipped step is HELD: it changes nothing, not even the count of steps. The training loop reads metrics one step
late, when the next step is already dispatched. Since that step is held, the loop still has the weights from before the skipped
step, for a save or a replay. After `release`, the loop takes the held step again with the same batch.
"""

import jax
import jax.numpy as jnp

# The outcome of a step, its metric `verdict`.
TAKEN, NOT_FINITE, SPIKE, HELD = range(4)
NAMES = {TAKEN: "taken", NOT_FINITE: "not finite", SPIKE: "spike", HELD: "held"}

WINDOW = 128  # applied steps that a loss is compared with
LEAST = 32  # applied steps before a step may count as a spike
SIGMA = 1.4826  # standard deviation over median absolute deviation of a normal distribution (Rousseeuw and Croux 1993)
FLAT = 0.01  # smallest deviation, as a fraction of the median: constant losses have a deviation of 0

Guard = dict[str, jax.Array]


def init_guard() -> Guard:
    """Return the guard of a new run: f32 (WINDOW,) losses and gradient norms of applied steps, and i32 () counts of steps.

    The counts are `taken` (applied steps), `skipped`, and `in_a_row` (skipped since the last applied step). `held` is 1 if the
    next step is held, otherwise 0.
    """
    zero = jnp.zeros((), jnp.int32)
    window = jnp.zeros(WINDOW, jnp.float32)
    counts = dict.fromkeys(("taken", "skipped", "in_a_row", "held"), zero)
    return {"losses": window, "norms": window, **counts}


def judge(guard: Guard, loss: jax.Array, norm: jax.Array, sigmas: float) -> tuple[jax.Array, Guard]:
    """Return (verdict of this step, guard for the next step). loss, norm: f32 (). sigmas: 0 accepts every finite step.

    A spike is a loss or a norm above median + sigmas x SIGMA x median absolute deviation of the last WINDOW applied steps. The
    deviation counts as at least FLAT x median / SIGMA. Before LEAST applied steps, no step is a spike. Unlike mean and standard
    deviation, median and median absolute deviation are robust against accepted spikes.
    """
    with jax.named_scope("guard"):
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        spike = jnp.zeros((), bool)
        if sigmas:
            count = jnp.minimum(guard["taken"], WINDOW)
            far = [value > _limit(guard[name], count, sigmas) for name, value in (("losses", loss), ("norms", norm))]
            spike = (count >= LEAST) & (far[0] | far[1])
        verdict = jnp.where(guard["held"] > 0, HELD, jnp.where(~finite, NOT_FINITE, jnp.where(spike, SPIKE, TAKEN)))
        is_taken, is_held = verdict == TAKEN, verdict == HELD
        slot_mask = (jnp.arange(WINDOW) == guard["taken"] % WINDOW) & is_taken
        updates = {
            "losses": jnp.where(slot_mask, loss, guard["losses"]),
            "norms": jnp.where(slot_mask, norm, guard["norms"]),
            "taken": guard["taken"] + is_taken,
            "skipped": guard["skipped"] + ~(is_taken | is_held),
            "in_a_row": jnp.where(is_held, guard["in_a_row"], jnp.where(is_taken, 0, guard["in_a_row"] + 1)),
            "held": jnp.where(is_taken, 0, 1),
        }
        return verdict.astype(jnp.int32), {name: x.astype(guard[name].dtype) for name, x in updates.items()}


def _limit(values: jax.Array, count: jax.Array, sigmas: float) -> jax.Array:
    """Return the limit above which a value is a spike, f32 (), from the first `count` of these values, f32 (WINDOW,)."""
    median = _median(values, count)
    spread = _median(jnp.abs(values - median), count)
    return median + sigmas * jnp.maximum(SIGMA * spread, FLAT * jnp.abs(median))


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the lower median of the first `count` values, f32 ().

    Each value's rank is counted by comparisons, which is cheaper on a GPU than a sort of WINDOW values.
    """
    i = jnp.arange(WINDOW)
    v = jnp.where(i < count, values, jnp.inf)
    below = (v[:, None] > v[None, :]) | ((v[:, None] == v[None, :]) & (i[:, None] > i[None, :]))
    rank = below.sum(axis=1)
    return jnp.sum(jnp.where((rank == (count - 1) // 2) & (i < count), values, 0.0))


def release(guard: Guard) -> Guard:
    """Return the guard with `held` set to 0, so that the next step is taken. Shardings are unchanged."""
    return guard | {"held": jax.device_put(jnp.zeros_like(guard["held"]), guard["held"].sharding)}
