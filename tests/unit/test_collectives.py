"""A plan's bytes on the wire and over the network, for all forms of a collective's HLO text.

proofs/test_plan_programs.py has compiled programs.
"""

import pytest

from jaxtrain.plan.program import collectives, hlo

MESH = {"data": 2, "fsdp": 4}


def module(line: str, extra: str = "") -> hlo.Module:
    """Return a module whose entry runs one instruction on a parameter %x."""
    return hlo.parse_hlo(
        f"HloModule made, is_scheduled=true, num_partitions=8\n\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        f"  ROOT %c = f32[] add(%a, %b)\n}}\n\n{extra}"
        f"ENTRY %main (x: f32[8,16]) -> f32[8,16] {{\n  %x = f32[8,16]{{1,0}} parameter(0)\n  {line}\n"
        "  ROOT %r = f32[8,16]{1,0} copy(%x)\n}\n"
    )


@pytest.mark.parametrize(
    ("groups", "axis", "group"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp", 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("{{3,1,0,2},{5,4,7,6}}", "fsdp", 4),
        ("{}", "data+fsdp", 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "", 1),
        ("[2,4]<=[8]", "fsdp", 4),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("[1,8]<=[8]", "data+fsdp", 8),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", "fsdp", 4),
        ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", "data+fsdp", 8),
        ("mesh['a'=8] {'a':(1)2}", "data", 2),
        ("mesh['a'=8] {'a':(2)4}", "fsdp", 4),
        ("mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", "fsdp(2 of 4)", 2),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", "data", 2),
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'x'}", "fsdp", 4),
    ],
)
def test_replica_groups(groups, axis, group):
    line = f"all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    (found,) = collectives.read_collectives(module(f"%y = f32[8,16]{{1,0}} {line}"), MESH, 8).values()
    assert (found.axis, found.group) == (axis, group)
    assert found.wire_bytes == 2 * (group - 1) / group * 512


OVER = {"fsdp": "[2,4]<=[8]", "data": "[4,2]<=[2,4]T(1,0)", "data+fsdp": "[1,8]<=[8]"}


@pytest.mark.parametrize(
    ("gpus_per_node", "kind", "axis", "expected"),
    [
        (8, "all-reduce", "data+fsdp", 0),
        # With nodes of 4, each fsdp group is a node. Over data, the two GPUs of a group are in different nodes: all bytes go
        # over the network. Over both axes, a ring of 8 leaves each node once with 896 bytes, which the node's 4 GPUs share.
        (4, "all-reduce", "data", 512),
        (4, "all-reduce", "data+fsdp", 896 / 4),
        (4, "reduce-scatter", "fsdp", 0),
        # With nodes of 2, an fsdp ring leaves each of its two nodes once, with 384 bytes that 2 GPUs share.
        (2, "reduce-scatter", "fsdp", 192),
        # Each device of a group gets a quarter of the 512 bytes. Two of the four devices are in another node.
        (2, "all-to-all", "fsdp", 256),
        (4, "all-to-all", "fsdp", 0),
        (4, "all-to-all", "data", 256),
        (4, "collective-permute", "fsdp", 0),
        (4, "collective-permute", "data", 512),
        (2, "collective-permute", "fsdp", 512),
    ],
)
def test_what_leaves_a_node_by_hand(gpus_per_node, kind, axis, expected):
    pairs = {"fsdp": "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "data": "{{0,4},{4,0},{1,5},{5,1}}"}
    groups = f"replica_groups={OVER[axis]}, use_global_device_ids=true, dimensions={{0}}, to_apply=%add"
    if kind == "collective-permute":
        groups = f"source_target_pairs={pairs[axis]}"
    shape = "f32[2,16]" if kind == "reduce-scatter" else "f32[8,16]"
    (found,) = collectives.read_collectives(
        module(f"%y = {shape} {kind}(%x), channel_id=1, {groups}"), MESH, gpus_per_node
    ).values()
    assert (found.axis, found.network_bytes) == (axis, expected)
    # A ring on two nodes makes one hop between them, and so does a permutation.
    assert found.hops == {"all-reduce": 2}.get(kind, 1) * bool(expected)


@pytest.mark.parametrize(
    ("kind", "nodes", "hops"),
    [("reduce-scatter", 128, 127), ("all-reduce", 128, 14), ("all-reduce", 5, 6), ("all-to-all", 16, 1)],
)
def test_hops_from_node_to_node(kind, nodes, hops):
    """A ring makes a hop to each other node, an all-reduce goes up and down a tree, and an all-to-all makes a single hop."""
    assert collectives._hops(kind, nodes) == hops


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
        (f"%y = ((f32[8,16]), f32[32,16]) all-gather-start(%x), {FSDP}", ("all-gather", "f32", "fsdp", 3 * 512)),
        (
            f"%z = bf16[4]{{0}} parameter(1)\n  %y = (f32[32,16], bf16[16]) all-gather(%x, /*index=1*/%z), {FSDP}",
            ("all-gather", "f32+bf16", "fsdp", 3 * (512 + 8)),
        ),
        ("%y = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%fused", ("reduce-scatter", "f32", "fsdp", 384)),
        (f"%y = {STARTED} async-start(%x), calls=%fused", ("reduce-scatter", "f32", "fsdp", 384)),
        (
            "%y = f32[8,16] collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{5,5}}",
            ("collective-permute", "f32", "", 0),
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
    (found,) = collectives.read_collectives(module(line, extra=FUSED), MESH, 8).values()
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
    (found,) = collectives.read_collectives(module(line, extra=TWICE), MESH, 8).values()
    assert (found.instruction, found.count, found.wire_bytes) == ("g", 2, 3 * 512)


def test_collectives_of_one_launch_are_added_up():
    """The bytes of a launch are summed over its collectives: here a GPU sends 384 bytes for each of two reduce-scatters. On
    nodes of 2 GPUs, each GPU sends half of these bytes between nodes.
    """
    line = "%y = (f32[2,16], f32[2,16]) fusion(%x, %x), kind=kCustom, calls=%both"
    (found,) = collectives.read_collectives(module(line, extra=BOTH), MESH, 2).values()
    assert (found.wire_bytes, found.network_bytes, found.dtype, found.f32) == (2 * 384, 2 * 192, "f32", 1.0)
    mixed = f"%z = bf16[4]{{0}} parameter(1)\n  %y = (f32[32,16], bf16[16]) all-gather(%x, %z), {FSDP}"
    (found,) = collectives.read_collectives(module(mixed), MESH, 8).values()
    assert found.f32 == 512 / 520


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
            for groups in ("{{0,3},{1,2},{4,7},{5,6}}", "{{0,1,2,3}}", "{{0,8},{1,2},{3,4},{5,6}}", "everybody")
        ),
        "collective-permute(%x), channel_id=1, source_target_pairs={0,1}",
        "collective-permute(%x), channel_id=1, source_target_pairs={{0,9}}",
        "all-whisper(%x), channel_id=1, replica_groups={}",
        "send(%x), channel_id=1",
    ],
)
def test_what_is_not_understood_is_refused(line):
    with pytest.raises(hlo.HloError, match="^y: "):
        collectives.read_collectives(module(f"%y = f32[8,16]{{1,0}} {line}"), MESH, 8)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(hlo.HloError, match="'data': 2"):
        collectives.read_collectives(module("%y = f32[8,16]{1,0} negate(%x)"), {"data": 2}, 8)
