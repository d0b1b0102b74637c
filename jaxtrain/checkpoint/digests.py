"""Digests of arrays, computed on their devices: equal bits have equal digests, on any mesh and any number of processes.

A digest is three sums modulo 2^32 over an array's elements, read as unsigned words w_i of their own width: the sum of w_i, the
sum of w_i x (2654435761 i | 1), and the number of elements that are not finite. Integer sums do not depend on their order, so
the digest does not depend on the sharding. One flipped bit changes the first sum by a power of two below 2^32, never by 0.
Swapped elements change the second sum. (The factor is Knuth's, from The Art of Computer Programming 6.4.)

Each device sums its shards, and one all-reduce adds all sums of a call. Hundreds of small all-reduces would need the same order
on every process, relative to the all-reduces of training.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

KNUTH = 2654435761
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
MAX_ARRAYS = 8  # arrays of one shape, dtype and sharding whose digests `digest_arrays` computes in one program


def digest_sums(x: jax.Array, begin: Sequence[Any] = (), shape: Sequence[int] = ()) -> jax.Array:
    """Return the digest of an array whose elements have 1, 2 or 4 bytes, uint32 (3,). For use inside jit.

    begin, shape: if `x` is a shard, its offset in the global array and the global shape.
    """
    word = jax.lax.bitcast_convert_type(x.astype(jnp.uint8) if x.dtype == bool else x, WORDS[x.dtype.itemsize])
    w = word.astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        position += jnp.asarray(begin[axis], jnp.uint32) if begin else jnp.uint32(0)
        index += position * jnp.uint32(stride % (1 << 32))
        stride *= shape[axis] if shape else x.shape[axis]
    weighted = w * ((index * jnp.uint32(KNUTH)) | jnp.uint32(1))
    nonfinite = jnp.zeros(x.shape, bool) if not jnp.issubdtype(x.dtype, jnp.floating) else ~jnp.isfinite(x)
    # One reduction computes all three sums. For three reductions, XLA's CPU compiler would write their operands to memory,
    # which are six times as large as a bfloat16 array.
    zeros = (jnp.uint32(0),) * 3
    return jnp.stack(jax.lax.reduce((w, weighted, nonfinite.astype(jnp.uint32)), zeros, _add_sums, tuple(range(x.ndim))))


def _add_sums(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(lhs, rhs, strict=True))


def mesh_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dimension of an array."""
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]


def digest_layers(arrays: Sequence[jax.Array], stacked: Sequence[bool]) -> list[jax.Array]:
    """Begin to compute digests of arrays in device memory: uint32 (3,), or (layers, 3) for arrays stacked on axis 0."""
    return digest_program(arrays, stacked)(*arrays)


def digest_program(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct], stacked: Sequence[bool]) -> Any:
    """Return the jitted function that maps arrays of these shapes and shardings to the result of `digest_layers`."""
    return _program(tuple((x.shape, layers, x.sharding) for x, layers in zip(arrays, stacked, strict=True)))


@functools.lru_cache(maxsize=256)
def _program(kinds: tuple[tuple[tuple[int, ...], bool, Any], ...]) -> Any:
    """Return the jitted function that maps arrays to their digests, replicated over the devices.

    kinds: for each array (shape, whether layers are stacked on axis 0, sharding).
    """
    if not all(isinstance(sharding, NamedSharding) for _, _, sharding in kinds):

        def digest_unsharded(*arrays: jax.Array) -> list[jax.Array]:
            return [
                jax.vmap(digest_sums)(x) if layers else digest_sums(x) for x, (_, layers, _) in zip(arrays, kinds, strict=True)
            ]

        return jax.jit(digest_unsharded)
    mesh: Mesh = kinds[0][2].mesh
    axes = [mesh_axes(sharding, len(shape)) for shape, _, sharding in kinds]
    specs = [P(*(dim_axes or None for dim_axes in array_axes)) for array_axes in axes]

    def digest_shards(*arrays: jax.Array) -> jax.Array:
        shard_digests = []
        for x, (shape, layers, _), array_axes in zip(arrays, kinds, axes, strict=True):
            begin = [
                jax.lax.axis_index(dim_axes) * n if dim_axes else 0 for dim_axes, n in zip(array_axes, x.shape, strict=True)
            ]
            if layers:
                layer_digests = jax.vmap(lambda y, begin=begin, shape=shape: digest_sums(y, begin[1:], shape[1:]))(x)
                digest = jax.lax.dynamic_update_slice(jnp.zeros((shape[0], 3), jnp.uint32), layer_digests, (begin[0], 0))
            else:
                digest = digest_sums(x, begin, shape)[None]
            # One of the devices that hold replicas of a shard adds its sums, the others add zeros.
            sharding_axes = {axis for dim_axes in array_axes for axis in dim_axes}
            is_first = jnp.asarray(True)
            for axis in mesh.axis_names:
                is_first &= (jax.lax.axis_index(axis) == 0) | (axis in sharding_axes)
            shard_digests.append(jnp.where(is_first, digest, 0))
        return jax.lax.psum(jnp.concatenate(shard_digests), mesh.axis_names)

    digest_sharded = jax.shard_map(digest_shards, mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=False)

    def split_digests(*arrays: jax.Array) -> list[jax.Array]:
        digests, out, offset = digest_sharded(*arrays), [], 0
        for shape, layers, _ in kinds:
            rows = shape[0] if layers else 1
            out.append(digests[offset : offset + rows] if layers else digests[offset])
            offset += rows
        return out

    return jax.jit(split_digests, out_shardings=[NamedSharding(mesh, P())] * len(kinds))


def digest_arrays(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the digests of arrays by name, uint32 (3,).

    Each call of `digest_layers` has at most MAX_ARRAYS arrays, and begins after the previous call is done. Calls with the same
    number of arrays of one shape, dtype and sharding share a compiled program.
    """
    kinds: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        kinds.setdefault((x.shape, x.dtype, x.sharding), []).append(name)
    out: dict[str, np.ndarray] = {}
    for names in kinds.values():
        for batch in (names[i : i + MAX_ARRAYS] for i in range(0, len(names), MAX_ARRAYS)):
            on_device = [_on_device(arrays[name]) for name in batch]
            digests = [np.asarray(x) for x in digest_layers(on_device, [False] * len(on_device))]
            out.update(zip(batch, digests, strict=True))
    return {name: out[name] for name in arrays}


def _on_device(x: jax.Array) -> jax.Array:
    """Return the array, copied to device memory if it is in pinned host memory: XLA cannot compute on it there."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding) and sharding.memory_kind == "pinned_host":
        return jax.device_put(x, sharding.with_memory_kind("device"))
    return x


def to_hex(digest: Any) -> str:
    """Return a digest as files store it: the two sums that identify the bits, as 16 hexadecimal digits."""
    first, second, _ = np.asarray(digest).tolist()
    return f"{first:08x}{second:08x}"


def not_finite(digest: Any) -> int:
    """Return the number of elements that are infinite or NaN."""
    return int(np.asarray(digest)[2])


def list_not_finite(digests: Mapping[str, Any], prefix: str = "params.") -> str:
    """Return the arrays with elements that are infinite or NaN, as text with their counts; "" if there is none.

    digests: name -> digest. prefix: the beginning of the names that count.
    """
    counts = {name: count for name, x in digests.items() if name.startswith(prefix) and (count := not_finite(x))}
    shown = ", ".join(f"{name} ({count:,} values)" for name, count in list(counts.items())[:3])
    return shown + (f" and {len(counts) - 3} more" if len(counts) > 3 else "")


def combine_digests(texts: Iterable[tuple[str, str]]) -> str:
    """Return one digest for many tensors, from (name, digest) pairs in any order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(texts))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
