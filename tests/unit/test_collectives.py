"""A plan's bytes on the wire, compared with sums by hand: five small programs, and all forms of a collective's HLO text."""

import re
from collections.abc import Iterable

import pytest
from collective_programs import BY_HAND, MESH, compiled, exchanges, launches, scatters, shifts, sums

from jaxtrain.plan.program import collectives, hlo


def network(found: Iterable[collectives.Found]) -> dict[tuple[str, str], float]:
    """Return {(kind, axes): bytes that a GPU sends over the network in one launch}."""
    return {(f.kind, f.axis): f.network_bytes for f in found}


@pytest.mark.parametrize("function", BY_HAND, ids=lambda f: f.__name__)
def test_bytes_and_launches_by_hand(function):
    found = collectives.read(compiled(function, on_gpus=False), MESH, gpus_per_node=4).values()
    assert launches(found) == BY_HAND[function][1]
    assert {f.dtype for f in found} == {"f32"}
    assert {f.source.split(":")[0] for f in found} == {"tests/collective_programs.py"}
    assert max(len(f.loops) for f in found) == 2


@pytest.mark.parametrize(
    ("gpus_per_node", "function", "expected"),
    [
        (8, sums, {("all-reduce", "data"): 0, ("all-reduce", "data+fsdp"): 0}),
        # With nodes of 4, each fsdp group is a node. Over data, the two GPUs of a group are in different nodes: all bytes go
        # over the network. Over both axes, a ring of 8 leaves each node once with 1792 bytes, which the node's 4 GPUs share.
        (4, sums, {("all-reduce", "data"): 1024, ("all-reduce", "data+fsdp"): 1792 / 4}),
        (4, scatters, dict.fromkeys([("reduce-scatter", "fsdp"), ("all-gather", "fsdp")], 0)),
        # With nodes of 2, an fsdp ring leaves each of its two nodes once, with 384 bytes that 2 GPUs share.
        (2, scatters, dict.fromkeys([("reduce-scatter", "fsdp"), ("all-gather", "fsdp")], 192)),
        # Each device of a group gets a quarter of the 512 bytes. Two of the four devices are in another node.
        (2, exchanges, {("all-to-all", "fsdp"): 256, ("all-to-all", "data"): 256}),
        (4, exchanges, {("all-to-all", "fsdp"): 0, ("all-to-all", "data"): 256}),
        (4, shifts, {("collective-permute", "fsdp"): 0, ("collective-permute", "data"): 512}),
        (2, shifts, {("collective-permute", "fsdp"): 512, ("collective-permute", "data+fsdp"): 512}),
    ],
)
def test_what_leaves_a_node_by_hand(gpus_per_node, function, expected):
    found = network(collectives.read(compiled(function, on_gpus=False), MESH, gpus_per_node).values())
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("kind", "nodes", "hops"),
    [
        *(("all-gather", 1, 0), ("all-gather", 2, 1), ("reduce-scatter", 128, 127)),
        *(("all-reduce", 1, 0), ("all-reduce", 2, 2), ("all-reduce", 128, 14), ("all-reduce", 5, 6)),
        *(("all-to-all", 1, 0), ("all-to-all", 16, 1)),
    ],
)
def test_hops_from_node_to_node(kind, nodes, hops):
    """A ring makes a hop to each other node, an all-reduce goes up and down a tree, and an all-to-all makes a single hop."""
    assert collectives._hops(kind, nodes) == hops


def test_hops_of_a_program():
    """A ring over fsdp=4 on nodes of 2 GPUs makes one hop between nodes, and so does a permutation across nodes."""
    found = collectives.read(compiled(scatters, on_gpus=False), MESH, 2).values()
    assert {f.hops for f in found if f.axis == "fsdp"} == {1}
    assert {f.hops for f in collectives.read(compiled(scatters, on_gpus=False), MESH, 8).values()} == {0}
    assert {f.hops for f in collectives.read(compiled(shifts, on_gpus=False), MESH, 2).values()} == {1}


# ---- Forms of the HLO text


def module(line: str, parameters: str = "f32[8,16]{1,0}", extra: str = "", devices: int = 8) -> hlo.Module:
    """Return a module whose entry runs one instruction on a parameter %x."""
    return hlo.parse(
        f"HloModule made, is_scheduled=true, num_partitions={devices}\n\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        f"  ROOT %c = f32[] add(%a, %b)\n}}\n\n{extra}"
        f"ENTRY %main (x: f32[8,16]) -> f32[8,16] {{\n  %x = {parameters} parameter(0)\n  {line}\n"
        "  ROOT %r = f32[8,16]{1,0} copy(%x)\n}\n"
    )


def all_reduce(groups: str, **shape: int) -> collectives.Found:
    line = f"all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    (found,) = collectives.read(module(f"%y = f32[8,16]{{1,0}} {line}"), shape or MESH, 8).values()
    return found


@pytest.mark.parametrize(
    ("groups", "axis", "group"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp", 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("{{3,1,0,2},{5,4,7,6}}", "fsdp", 4),
        ("{{0,1,2,3,4,5,6,7}}", "data+fsdp", 8),
        ("{}", "data+fsdp", 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "", 1),
        ("[2,4]<=[8]", "fsdp", 4),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("[1,8]<=[8]", "data+fsdp", 8),
        ("mesh['a'=8] {'a'}", "data+fsdp", 8),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", "fsdp", 4),
        ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", "data+fsdp", 8),
        ("mesh['a'=8] {'a':(1)2}", "data", 2),
        ("mesh['a'=8] {'a':(2)4}", "fsdp", 4),
        ("mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}", "fsdp(2 of 4)", 2),
        ("mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", "fsdp(2 of 4)", 2),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", "data", 2),
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'x'}", "fsdp", 4),
    ],
)
def test_replica_groups(groups, axis, group):
    found = all_reduce(groups)
    assert (found.axis, found.group) == (axis, group)
    assert found.wire_bytes == 2 * (group - 1) / group * 512


def test_axes_of_a_mesh_with_four():
    shape = {"data": 2, "fsdp": 2, "tensor": 2, "seq": 1}
    for groups, axis in (
        ("{{0,1,4,5},{2,3,6,7}}", "data+tensor"),
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp+tensor"),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2,'seq'=1] {'data','seq'}", "data"),
    ):
        assert all_reduce(groups, **shape).axis == axis


FSDP = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, dimensions={0}"
FUSED = f"""%fused (p: f32[8,16]) -> f32[2,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %s = f32[8,16]{{1,0}} negate(%p)
  ROOT %rs = f32[2,16]{{1,0}} reduce-scatter(%s), {FSDP}, to_apply=%add
}}

"""
STARTED = "((f32[8,16]{1,0}), f32[2,16]{1,0})"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%y = f32[32,16]{{1,0}} all-gather(%x), {FSDP}", ("all-gather", "f32", "fsdp", 3 * 512)),
        (f"%y = ((f32[8,16]), f32[32,16]) all-gather-start(%x), {FSDP}", ("all-gather", "f32", "fsdp", 3 * 512)),
        (
            f"%z = bf16[4]{{0}} parameter(1)\n  %y = (f32[32,16], bf16[16]) all-gather(%x, /*index=1*/%z), {FSDP}",
            ("all-gather", "f32+bf16", "fsdp", 3 * (512 + 8)),
        ),
        ("%y = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%fused", ("reduce-scatter", "f32", "fsdp", 384)),
        (f"%y = {STARTED} fusion-start(%x), kind=kCustom, calls=%fused", ("reduce-scatter", "f32", "fsdp", 384)),
        (f"%y = {STARTED} async-start(%x), calls=%fused", ("reduce-scatter", "f32", "fsdp", 384)),
        (
            "%y = f32[8,16] collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{5,5}}",
            ("collective-permute", "f32", "", 0),
        ),
        (
            "%y = f32[8,16] collective-broadcast(%x), channel_id=1, replica_groups=[4,2]<=[8]",
            ("collective-broadcast", "f32", "fsdp(2 of 4)", 512),
        ),
        # Groups of replicas: the program has one replica. With a channel id, the group is all its devices.
        ("%y = f32[8,16] all-reduce(%x), replica_groups={{0}}, to_apply=%add", ("all-reduce", "f32", "", 0)),
        (
            "%y = f32[8,16] all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add",
            ("all-reduce", "f32", "data+fsdp", 2 * 7 / 8 * 512),
        ),
    ],
)
def test_forms_of_a_collective(line, expected):
    (found,) = collectives.read(module(line, extra=FUSED), MESH, 8).values()
    assert (found.kind, found.dtype, found.axis, found.wire_bytes) == expected
    assert found.instruction == "y" and found.count == 1


TWICE = f"""%again (p: f32[8,16]) -> f32[32,16] {{
  %p.1 = f32[8,16]{{1,0}} parameter(0)
  ROOT %g = f32[32,16]{{1,0}} all-gather(%p.1), {FSDP}
}}

"""
BOTH = f"""%both (p: f32[8,16], q: f32[8,16]) -> (f32[2,16], f32[2,16]) {{
  %p.2 = f32[8,16]{{1,0}} parameter(0)
  %q.2 = f32[8,16]{{1,0}} parameter(1)
  %first = f32[2,16]{{1,0}} reduce-scatter(%p.2), {FSDP}, to_apply=%add
  %second = f32[2,16]{{1,0}} reduce-scatter(%q.2), {FSDP}, to_apply=%add
  ROOT %t = (f32[2,16]{{1,0}}, f32[2,16]{{1,0}}) tuple(%first, %second)
}}

"""


def test_a_computation_that_is_called_twice_launches_twice():
    line = "%y = f32[32,16]{1,0} call(%x), to_apply=%again\n  %z = f32[32,16]{1,0} call(%x), to_apply=%again"
    (found,) = collectives.read(module(line, extra=TWICE), MESH, 8).values()
    assert (found.instruction, found.count, found.wire_bytes) == ("g", 2, 3 * 512)


def test_collectives_of_one_launch_are_added_up():
    """The bytes of a launch are summed over its collectives: here a GPU sends 384 bytes for each of two reduce-scatters. On
    nodes of 2 GPUs, each GPU sends half of these bytes between nodes.
    """
    line = "%y = (f32[2,16], f32[2,16]) fusion(%x, %x), kind=kCustom, calls=%both"
    (found,) = collectives.read(module(line, extra=BOTH), MESH, 2).values()
    assert (found.wire_bytes, found.network_bytes, found.dtype, found.f32) == (2 * 384, 2 * 192, "f32", 1.0)
    mixed = f"%z = bf16[4]{{0}} parameter(1)\n  %y = (f32[32,16], bf16[16]) all-gather(%x, %z), {FSDP}"
    (found,) = collectives.read(module(mixed), MESH, 8).values()
    assert found.f32 == 512 / 520, "of the bytes those that are float32"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (f"all-reduce(%x), channel_id=1, replica_groups={g}, use_global_device_ids=true, to_apply=%add", error)
        for g, error in (
            ("{{0,3},{1,2},{4,7},{5,6}}", "lie along no axes of the mesh"),
            ("{{0,1,2,3}}", "do not divide the 8 devices"),
            ("{{0,1,2},{3,4,5,6,7}}", "do not divide the 8 devices"),
            ("{{0,8},{1,2},{3,4},{5,6}}", "do not divide the 8 devices"),
            ("{{0,1,4,5},{2,3,6,7}}", "lie along no axes of the mesh"),
            ("everybody", "cannot be read: 'everybody'"),
        )
    ]
    + [
        ("collective-permute(%x), channel_id=1, source_target_pairs={0,1}", "source_target_pairs cannot be read"),
        ("collective-permute(%x), channel_id=1, source_target_pairs={{0,9}}", "names device 9, and there are 8"),
        ("all-whisper(%x), channel_id=1, replica_groups={}", "all-whisper moves data between devices in a way"),
        ("send(%x), channel_id=1", "send moves data between devices in a way"),
    ],
)
def test_what_is_not_understood_is_refused(line, error):
    with pytest.raises(hlo.HloError, match=f"^y: .*{re.escape(error)}"):
        collectives.read(module(f"%y = f32[8,16]{{1,0}} {line}"), MESH, 8)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(hlo.HloError, match="made for 8 devices, but the mesh is {'data': 2}"):
        collectives.read(module("%y = f32[8,16]{1,0} negate(%x)"), {"data": 2}, 8)
