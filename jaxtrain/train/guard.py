"""Steps that are not taken: a loss or gradient that is no finite number, or that stands far out of what came before.

Decided inside the compiled step, from numbers that are the same on every device, and kept in the train state, so that a resumed
run decides as an uninterrupted one would. A step that is not taken leaves parameters and moments as they were, to the bit.

The step after such a one changes nothing at all, not even the count of steps: its metrics say HELD. The training loop reads
metrics one step late, and so still finds the very state that the bad step was computed from: it can be saved, replayed or left.
`released` lets the run go on; the held step is then taken again with the same batch.
"""

import jax
import jax.numpy as jnp

# What became of a step, as its metric `verdict` says.
TAKEN, NOT_FINITE, SPIKE, HELD = range(4)
NAMES = {TAKEN: "taken", NOT_FINITE: "not finite", SPIKE: "spike", HELD: "held"}

WINDOW = 128  # taken steps that a loss is compared with
LEAST = 32  # of them before anything counts as a spike
SIGMA = 1.4826  # of a normal distribution, over its median absolute deviation (Rousseeuw and Croux 1993)
FLAT = 0.01  # of the median is the least that counts as a deviation: losses that stand still have none

Guard = dict[str, jax.Array]


def fresh() -> Guard:
    """That of a new run: f32 (WINDOW,) losses and gradient norms of taken steps, and i32 () counts."""
    zero = jnp.zeros((), jnp.int32)
    window = jnp.zeros(WINDOW, jnp.float32)
    counts = dict.fromkeys(("taken", "skipped", "in_a_row", "held"), zero)
    return {"losses": window, "norms": window, **counts}


def judge(guard: Guard, loss: jax.Array, norm: jax.Array, sigmas: float) -> tuple[jax.Array, Guard]:
    """(verdict of this step, the guard after it). loss, norm: f32 (). sigmas: 0 lets every finite step pass.

    A spike is a loss or a norm above median + sigmas x SIGMA x median absolute deviation of the last WINDOW taken steps; unlike
    mean and standard deviation, neither moves much with the spikes that did get in.
    """
    with jax.named_scope("guard"):
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        spike = jnp.zeros((), bool)
        if sigmas:
            known = jnp.minimum(guard["taken"], WINDOW)
            far = [value > _limit(guard[name], known, sigmas) for name, value in (("losses", loss), ("norms", norm))]
            spike = (known >= LEAST) & (far[0] | far[1])
        verdict = jnp.where(guard["held"] > 0, HELD, jnp.where(~finite, NOT_FINITE, jnp.where(spike, SPIKE, TAKEN)))
        took, held = verdict == TAKEN, verdict == HELD
        here = (jnp.arange(WINDOW) == guard["taken"] % WINDOW) & took
        after = {
            "losses": jnp.where(here, loss, guard["losses"]),
            "norms": jnp.where(here, norm, guard["norms"]),
            "taken": guard["taken"] + took,
            "skipped": guard["skipped"] + ~(took | held),
            "in_a_row": jnp.where(held, guard["in_a_row"], jnp.where(took, 0, guard["in_a_row"] + 1)),
            "held": jnp.where(took, 0, 1),
        }
        return verdict.astype(jnp.int32), {name: x.astype(guard[name].dtype) for name, x in after.items()}


def _limit(values: jax.Array, known: jax.Array, sigmas: float) -> jax.Array:
    """f32 (): the largest that is no spike, from the first `known` of these values, f32 (WINDOW,)."""
    median = _median(values, known)
    spread = _median(jnp.abs(values - median), known)
    return median + sigmas * jnp.maximum(SIGMA * spread, FLAT * jnp.abs(median))


def _median(values: jax.Array, known: jax.Array) -> jax.Array:
    """f32 (): the lower median of the first `known` values, by counting: cheaper on a GPU than sorting so few."""
    i = jnp.arange(WINDOW)
    v = jnp.where(i < known, values, jnp.inf)
    below = (v[:, None] > v[None, :]) | ((v[:, None] == v[None, :]) & (i[:, None] > i[None, :]))
    rank = below.sum(axis=1)
    return jnp.sum(jnp.where((rank == (known - 1) // 2) & (i < known), values, 0.0))


def released(guard: Guard) -> Guard:
    """The same guard, for a step that is to be taken; with the shardings of the old one."""
    return guard | {"held": jax.device_put(jnp.zeros_like(guard["held"]), guard["held"].sharding)}
