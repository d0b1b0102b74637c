"""From logical axes to PartitionSpecs, by hand: weights at rest and in use, their gradients, and what cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding import LayoutError, Placement, left_whole, local_spec

RULES = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("seq",),
    "embed": ("fsdp", "expert"),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
}
GATE, EXPERTS = ("embed", "mlp"), ("experts", "expert_embed", "mlp")


def placement(**sizes: int) -> Placement:
    devices = np.array(jax.devices()).reshape(*sizes.values())
    return Placement(Mesh(devices, tuple(sizes)), tuple(RULES.items()))


PLACED = placement(data=1, fsdp=2, expert=2, tensor=2)


@pytest.mark.parametrize(
    ("layout", "given", "spec"),
    [
        ("sharding", (GATE,), P(("fsdp", "expert"), "tensor")),
        ("whole", (GATE,), P(None, "tensor")),
        ("home", (GATE,), P(("fsdp", "expert"), "tensor")),
        # One gradient for each device of the late axis, on a first dimension.
        ("home", (GATE, ("fsdp",)), P("fsdp", "expert", "tensor")),
        ("home", (GATE, ("fsdp", "expert")), P(("fsdp", "expert"), None, "tensor")),
        # Experts stay apart over their own axis, and are whole over the others that split the batch.
        ("sharding", (EXPERTS,), P("expert", "fsdp", "tensor")),
        ("whole", (EXPERTS,), P("expert", None, "tensor")),
        ("sharding", ((None, "batch", "sequence"),), P(None, ("fsdp", "expert"), None)),
    ],
)
def test_specs(layout: str, given: tuple, spec: P):
    """At rest (sharding), in use (whole), and of a gradient (home)."""
    assert getattr(PLACED, layout)(*given).spec == spec


def test_axes_of_a_weight():
    assert PLACED.gathered(*GATE) == ("fsdp", "expert") and PLACED.gathered(*EXPERTS) == ("fsdp",)
    assert (PLACED.parts("embed"), PLACED.parts("mlp"), PLACED.parts("sequence"), PLACED.parts(None)) == (4, 2, 1, 1)
    assert PLACED.inside("fsdp").parts("embed") == 2 and PLACED.inside("fsdp").whole(EXPERTS).spec == P(
        "expert", None, "tensor"
    )
    assert local_spec("BTF", "DF", GATE, PLACED) == P(("fsdp", "expert"), None, ("tensor",))
    assert local_spec("DF", "DF", GATE, PLACED) == P(None, ("tensor",))


def test_what_cannot_be_is_refused():
    with pytest.raises(
        LayoutError, match=r"x: logical axes embed and experts are both split over mesh axis 'expert'.*sharding.rules"
    ):
        PLACED.spec(("embed", "experts"), "x")
    with pytest.raises(LayoutError, match=r"x: axis 'embed' of size 6 does not divide over fsdp\+expert = 4"):
        PLACED.sharding(GATE, "x", (6, 2))
    with pytest.raises(LayoutError, match=r"'heads' has no rule: add sharding.rules.heads"):
        PLACED.spec(("heads",))


def test_large_arrays_that_every_device_holds_are_named():
    def of(placed: Placement) -> list[str]:
        specs = {"whole": P(), "split": P(placed.mesh.axis_names[-1])}
        arrays = {
            n: jax.ShapeDtypeStruct((1024, 8), jnp.float32, sharding=NamedSharding(placed.mesh, s)) for n, s in specs.items()
        }
        return left_whole(arrays, 32_767) + left_whole(arrays, 32_768)

    assert of(PLACED) == ["whole (0 MiB on each of 8 devices)"]
    assert of(placement(data=8)) == [], "replicas split nothing"
