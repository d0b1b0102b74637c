"""Digests of arrays depend on every bit and on its position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import digests

sums = jax.jit(digests.digest_sums)
ARRAYS = {
    "float32": np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32),
    "bfloat16": np.asarray(jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)), jnp.bfloat16)),
}


def digest(array) -> list[int]:
    return np.asarray(sums(array)).tolist()


@pytest.mark.parametrize("name", ARRAYS)
def test_a_digest_sees_the_order_of_elements_and_a_single_bit(name):
    array = ARRAYS[name]
    swapped = array.copy()
    swapped[0, 0], swapped[3, 2] = array[3, 2], array[0, 0]
    for other in (array[::-1], array[:, ::-1], swapped, array[[1, 0, 2, 3, 4, 5]]):
        assert digest(other) != digest(array)
        assert digest(other)[0] == digest(array)[0], "the sum of all words does not see it"
    flipped = array.copy()
    flipped.view(np.uint8)[5, 0] ^= 1
    assert digest(flipped) != digest(array)


@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (2, 1)])
def test_parts_add_up_to_the_whole(rows, columns):
    array = ARRAYS["float32"]
    begins = [(i, j) for i in range(0, 6, rows) for j in range(0, 5, columns)]
    parts = [digests.digest_sums(jnp.asarray(array[i : i + rows, j : j + columns]), (i, j), array.shape) for i, j in begins]
    assert np.asarray(sum(parts)).tolist() == digest(array)


def test_digests_of_many_arrays_do_not_depend_on_the_mesh():
    """The digests are equal for sharded and replicated arrays, and for arrays on one device."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    array[3, 3] = np.inf
    specs = {"replicated": (), "rows": ("fsdp",), "columns": (None, "tensor"), "both": (("fsdp", "tensor"),)}
    placed = {
        name: jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for name, spec in specs.items()
    }
    found = digests.digest_arrays({**placed, "one": jnp.asarray(array)})
    assert list(found) == [*specs, "one"]
    assert {digests.to_hex(x) for x in found.values()} == {digests.to_hex(digest(array))}
    assert {digests.not_finite(x) for x in found.values()} == {1}
