"""From logical axes to PartitionSpecs, by hand: stored and gathered weights, and refusals. Also collectives on shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import schema
from jaxtrain.config.layout import resolve_layout
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.sharding import (
    GatherSpec,
    Placement,
    gather_weight,
    large_replicated_arrays,
)

RULES = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("seq",),
    "residual": ("seq", "tensor"),
    "embed": ("fsdp", "expert"),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
}
GATE, EXPERTS = ("embed", "mlp"), ("experts", "expert_embed", "mlp")


def placement(**sizes: int) -> Placement:
    devices = np.array(jax.devices()).reshape(*sizes.values())
    layout = dataclasses.replace(resolve_layout(RunConfig(mesh=schema.Mesh(**sizes)), 8, 8), rules=tuple(RULES.items()))
    return Placement(Mesh(devices, tuple(sizes)), layout)


PLACED = placement(data=1, fsdp=2, expert=2, tensor=2)


@pytest.mark.parametrize(
    ("axes", "at_rest", "in_use", "replicas"),
    [
        (GATE, P(("fsdp", "expert"), "tensor"), [(), ("tensor",)], ()),
        # Experts stay sharded over `expert`. They are gathered over the other axes that shard the batch.
        (EXPERTS, P("expert", "fsdp", "tensor"), [("expert",), (), ("tensor",)], ()),
        ((None, "batch", "sequence"), P(None, ("fsdp", "expert"), None), [(), (), ()], ("tensor",)),
        (("embed",), P(("fsdp", "expert")), [()], ("tensor",)),
    ],
)
def test_layouts(axes: tuple, at_rest: P, in_use: list, replicas: tuple):
    """Each case has a stored weight's spec, the mesh axes that shard it in use, and the axes over which it is replicated."""
    assert PLACED.sharding(axes).spec == at_rest
    assert [PLACED.compute_axes(axis) for axis in axes] == in_use
    assert PLACED.replica_axes(axes) == replicas


def test_axes_of_a_weight():
    assert PLACED.gather_axes(*GATE) == ("fsdp", "expert") and PLACED.gather_axes(*EXPERTS) == ("fsdp",)
    assert [PLACED.size(PLACED.mesh_axes(a)) for a in ("embed", "mlp", "sequence", None)] == [4, 2, 1, 1]


def test_what_cannot_be_is_refused():
    refused = {
        "sharding.rules.embed": lambda: PLACED.spec(("embed", "experts")),  # both sharded over `expert`
        "sharding.rules.heads": lambda: PLACED.spec(("heads",)),
    }
    for key, make in (*refused.items(), ("sharding.rules.embed", lambda: PLACED.sharding(GATE, "x", (6, 2)))):
        with pytest.raises(ConfigError) as error:
            make()
        assert [problem.key for problem in error.value.problems] == [key]


def test_large_arrays_that_every_device_holds_are_named():
    def of(placed: Placement) -> list[str]:
        specs = {"whole": P(), "split": P(placed.mesh.axis_names[-1])}
        arrays = {
            n: jax.ShapeDtypeStruct((1024, 8), jnp.float32, sharding=NamedSharding(placed.mesh, s)) for n, s in specs.items()
        }
        return large_replicated_arrays(arrays, 32_767) + large_replicated_arrays(arrays, 32_768)

    (line,) = of(PLACED)
    assert line.startswith("whole ")
    assert of(placement(data=8)) == [], "replicas split nothing"


EVERY = P(("fsdp", "expert", "tensor"))  # a first dimension with one entry for each device
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def whole_numbers(*shape: int) -> np.ndarray:
    """Return integers whose sums bfloat16 represents exactly."""
    return np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32)


def test_a_weight_is_gathered_in_one_dtype_and_its_gradient_reduced_in_another():
    """The weight is gathered over `fsdp` and `expert` in bfloat16. Its gradient is summed over these axes in float32, and is
    sharded like the stored weight.
    """
    how = GatherSpec(((0, ("fsdp", "expert")),), (), BF16, F32)
    w, shares = whole_numbers(8, 6), whole_numbers(8, 8, 3)

    @jax.jit
    @functools.partial(PLACED.shard_map, in_specs=(PLACED.spec(GATE), EVERY), out_specs=(EVERY, PLACED.spec(GATE)))
    def run(w, share):
        made, back = jax.vjp(lambda w: gather_weight(w, how), w)
        return made[None], *back(share[0].astype(BF16))

    made, grad = run(w, shares)
    assert (made.dtype, grad.dtype) == (BF16, F32)
    halves = np.stack([w[:, :3], w[:, 3:]])  # device 2 i + t has half t of the columns
    np.testing.assert_array_equal(made.astype(F32), np.tile(halves, (4, 1, 1)))
    np.testing.assert_array_equal(grad, np.concatenate([shares[0::2].sum(0), shares[1::2].sum(0)], axis=1))
    wire = run.lower(w, shares).as_text()
    assert types_of(wire, "all_gather") == {"bf16"} and types_of(wire, "reduce_scatter") == {"f32"}


def types_of(text: str, collective: str) -> set[str]:
    """Return the element types of the results of a collective in StableHLO."""
    found, lines = set(), iter(text.splitlines())
    for line in lines:
        if f"stablehlo.{collective}" in line:
            while "-> tensor<" not in line:
                line = next(lines)
            found.add(line.split("-> tensor<")[1].split(">")[0].split("x")[-1])
    return found
