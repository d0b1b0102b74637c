"""Five small programs of collectives in nested loops on a mesh of data=2 and fsdp=4, with their bytes on the wire by hand."""

import collections
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.plan import topology
from jaxtrain.plan.program import hlo
from jaxtrain.plan.program.collectives import Found

MESH = {"data": 2, "fsdp": 4}


def nested(outer: int, inner: int, outer_step, inner_step):
    """Return a function that repeats, `outer` times: `inner` calls of `inner_step` in a loop, then one call of `outer_step`."""

    def run(x):
        def round(x, _):
            x, _ = jax.lax.scan(lambda x, _: (inner_step(x), None), x, None, length=inner)
            return outer_step(x), None

        return jax.lax.scan(round, x, None, length=outer)[0]

    return run


def gathers(x_AB):
    """Run all-gathers over fsdp (inner loop) and data (outer loop). x: [4, 16] on each device."""

    def inner(x_AB):
        return jnp.tanh(x_AB @ jax.lax.all_gather(x_AB, "fsdp", tiled=True))

    def outer(x_AB):
        return jnp.tanh(x_AB @ jax.lax.all_gather(x_AB, "data", axis=1, tiled=True).reshape(8, 16).T @ jnp.ones((8, 16)))

    return nested(3, 5, outer, inner)(x_AB)


def sums(x_AB):
    """Run all-reduces over data and fsdp together (inner loop) and over data alone (outer loop). x: [8, 32] on each device."""
    return nested(2, 4, lambda x: jnp.sin(jax.lax.psum(x, "data")), lambda x: jnp.cos(jax.lax.psum(x, ("data", "fsdp"))))(x_AB)


def scatters(x_AB):
    """Run reduce-scatter and all-gather pairs, over fsdp (inner loop) and data (outer loop). x: [8, 16] on each device."""

    def over(axis):
        def step(x):
            part = jnp.tanh(jax.lax.psum_scatter(x, axis, tiled=True))
            return x * jnp.cos(jax.lax.all_gather(part, axis, tiled=True))

        return step

    return nested(3, 2, over("data"), over("fsdp"))(x_AB)


def exchanges(x_AB):
    """Run all-to-alls over fsdp (inner loop) and data (outer loop). x: [8, 16] on each device."""
    return nested(
        4,
        3,
        lambda x: jnp.sin(jax.lax.all_to_all(x, "data", 0, 0, tiled=True)),
        lambda x: jnp.cos(jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)),
    )(x_AB)


def shifts(x_AB):
    """Run permutes: around the fsdp ring (inner loop), and a swap along data (outer loop). x: [8, 16] on each device.

    After the loops devices 1 and 6 swap their arrays, and devices 0 and 2 keep their own.
    """
    x_AB = nested(
        2,
        5,
        lambda x: jnp.sin(jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])),
        lambda x: jnp.cos(jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 2), (2, 3), (3, 0)])),
    )(x_AB)
    return jnp.tanh(jax.lax.ppermute(x_AB, ("data", "fsdp"), [(0, 0), (1, 6), (6, 1), (2, 2)]))


# Program -> (shape of its array on one device, {(kind, axes, devices in a group, bytes a GPU sends in a launch): launches}). In
# a group of n devices, a GPU sends (n-1) local shards in an all-gather, (n-1)/n of the array in a reduce-scatter or an
# all-to-all, and 2 (n-1)/n of the array in an all-reduce. f32[8,16] is 512 bytes.
BY_HAND = {
    gathers: (
        (4, 16),
        {
            ("all-gather", "fsdp", 4, 3 * 256): 3 * 5,  # a local shard is 256 bytes
            ("all-gather", "data", 2, 1 * 256): 3,
        },
    ),
    sums: (
        (8, 32),
        {
            ("all-reduce", "data+fsdp", 8, 2 * 7 / 8 * 1024): 2 * 4,
            ("all-reduce", "data", 2, 2 * 1 / 2 * 1024): 2,
        },
    ),
    scatters: (
        (8, 16),
        {
            ("reduce-scatter", "fsdp", 4, 3 / 4 * 512): 3 * 2,
            ("all-gather", "fsdp", 4, 3 * 128): 3 * 2,
            ("reduce-scatter", "data", 2, 1 / 2 * 512): 3,
            ("all-gather", "data", 2, 1 * 256): 3,
        },
    ),
    exchanges: (
        (8, 16),
        {
            ("all-to-all", "fsdp", 4, 3 / 4 * 512): 4 * 3,
            ("all-to-all", "data", 2, 1 / 2 * 512): 4,
        },
    ),
    shifts: (
        (8, 16),
        {
            ("collective-permute", "fsdp", 4, 512): 2 * 5,
            ("collective-permute", "data", 2, 512): 2,
            ("collective-permute", "data+fsdp", 8, 512): 1,
        },
    ),
}


@functools.cache
def compiled(function, on_gpus: bool) -> hlo.Module:
    devices = topology.devices(topology.parse("h200:4x2")) if on_gpus else jax.devices()
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "fsdp"))
    spec = PartitionSpec(("data", "fsdp"))
    rows, columns = BY_HAND[function][0]
    x = jax.ShapeDtypeStruct((8 * rows, columns), jnp.float32, sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return hlo.parse(jax.jit(mapped).lower(x).compile().as_text() or "")


def launches(found: Iterable[Found]) -> dict[tuple, int]:
    """Return {(kind, axes, devices in a group, bytes on the wire): launches}, summed over instructions.

    The compiler may peel the first round off a loop: then two instructions share the launches.
    """
    out = collections.Counter()
    for f in found:
        out[f.kind, f.axis, f.group, f.wire_bytes] += f.count
    return dict(out)
