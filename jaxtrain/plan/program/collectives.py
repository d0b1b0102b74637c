"""Read the collectives of a scheduled module: the mesh axes of each, its bytes on the wire, and its hops between nodes.

Bytes are those of the ring algorithms, which send the fewest bytes possible (n is the number of devices in a group):

    all-gather          (n-1)/n of the gathered array    reduce-scatter       (n-1)/n of the array that is reduced
    all-reduce          2(n-1)/n of the array            all-to-all           (n-1)/n of the array
    collective-permute  the array                        collective-broadcast the array

A ring visits the devices node by node, so in each node only one GPU sends to the next node. NCCL runs a ring for each network
card, which spreads these sends over the GPUs of the node. So a GPU's share of the network traffic is the bytes that it sends,
divided by the number of its group's GPUs in its node. An all-to-all is not a ring: its bytes for devices of other nodes cross
the network. If any pair of a permutation crosses nodes, all its bytes count as network traffic: the GPU at the border sends
all of its bytes over the network.

Each hop from node to node has a latency. The first byte of a ring passes through all nodes, one after the other. For its
latency, an all-reduce counts as a tree of nodes, up and down, since NCCL uses a tree if that is faster.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable

import numpy as np

from jaxtrain.plan.program.hlo import Computation, HloError, Instruction, Module, leaves, walk

_ALL_TO_ALLS = ("all-to-all", "ragged-all-to-all")  # each device sends a different part to every other device
KINDS = ("all-gather", "reduce-scatter", "all-reduce", *_ALL_TO_ALLS, "collective-broadcast", "collective-permute")
# Their replica_groups list replicas (the program has one replica), unless use_global_device_ids is set.
_REPLICA_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
_LAUNCHES = ("fusion", "fusion-start", "async-start", "call-start")
_LIST = re.compile(r"\{\s*(?:\{[\d,\s]*\}\s*,?\s*)*\}")
_PAIRS = re.compile(r"\{\s*(?:\{\s*\d+\s*,\s*\d+\s*\}\s*,?\s*)*\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[((?:'[^']+'=\d+,?)*)\](?:, device_ids=\((.*)\))? \{(.*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class CollectiveOp:
    """One collective instruction. Byte counts are bytes that each GPU sends in one launch."""

    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute | ...
    dtype: str  # on the wire; the dtypes of arrays combined into one launch are joined by "+"
    axis: str  # mesh axes, joined by "+"; "fsdp(2 of 4)" is a part of an axis; "" is a group of one device
    group: int  # devices in one group
    count: int  # launches a step
    wire_bytes: float
    network_bytes: float  # a GPU's share of the bytes that leave its node
    source: str
    op_name: str
    instruction: str  # name in the schedule; of the fusion or async-start, if the collective is inside of one
    loops: tuple[str, ...]  # names of the while loops around it, from outside in
    hops: int = 0  # successive hops between nodes
    f32: float = 1.0  # if float32 is among the dtypes: the fraction of bytes in float32

    @property
    def message(self) -> float:
        """Return the bytes of a launch's message as nccl-tests count it: the gathered, reduced or exchanged array."""
        if self.kind == "collective-permute" or self.group == 1:
            return self.wire_bytes
        operand_bytes = self.wire_bytes / _ring_bytes(self.kind, 1, self.group)
        return operand_bytes * self.group if self.kind == "all-gather" else operand_bytes


def read_collectives(module: Module, mesh_shape: dict[str, int], gpus_per_node: int) -> dict[str, CollectiveOp]:
    """Return instruction -> the collective that it launches, for every collective of a module, in scheduled order.

    Args:
      mesh_shape: axis -> size, in device order (row-major: the last axis varies fastest).

    Raises HloError for a collective that cannot be parsed, or whose device groups do not follow axes of this mesh.
    """
    if math.prod(mesh_shape.values()) != module.num_partitions:
        raise HloError(f"module {module.name}: made for {module.num_partitions} devices, but the mesh is {mesh_shape}")
    mesh = _Mesh(mesh_shape, gpus_per_node)
    collective_ops: dict[str, CollectiveOp] = {}
    inside: set[str] = set()  # computations inside of a launch that is counted already
    for i, computation, times, loops in walk(module):
        if i.name in inside:
            continue
        launched = [(i, computation)] if _kind(i) else _within(module, i.called) if i.opcode in _LAUNCHES else []
        inside |= {inner.name for inner, _ in launched if inner is not i}
        if not launched:
            continue
        op = _merge_ops([_make_op(mesh, inner, parent, i, times, loops) for inner, parent in launched])
        before = collective_ops.get(i.name)  # counted before, if several instructions call the computation
        collective_ops[i.name] = dataclasses.replace(before, count=before.count + times) if before else op
    return collective_ops


def is_collective(module: Module, i: Instruction) -> bool:
    """Return whether an instruction is a collective, or an asynchronous call or fusion that contains a collective."""
    if i.opcode.removesuffix("-start") in KINDS:
        return True
    inside = (module.computations[c] for c in i.called) if i.opcode in _LAUNCHES else ()
    return any(is_collective(module, inner) for called in inside for inner in called.instructions)


def _kind(i: Instruction) -> str | None:
    """Return the kind of a collective instruction; None for other instructions. Raises HloError for an unknown collective."""
    kind = i.opcode.removesuffix("-start")
    if kind in KINDS:
        return kind
    between_devices = i.opcode in ("send", "recv") and i.attributes.get("is_host_transfer") != "true"
    if between_devices or "replica_groups" in i.attributes or "source_target_pairs" in i.attributes:
        raise HloError(f"{i.name}: {i.opcode} moves data between devices in a way that is not understood: {i.attributes}")
    return None


def _within(module: Module, called: Iterable[str]) -> list[tuple[Instruction, Computation]]:
    """Return the collectives of these computations and of the computations that they call."""
    out = []
    for name in called:
        computation = module.computations[name]
        for i in computation.instructions:
            out += [(i, computation)] if _kind(i) else _within(module, i.called)
    return out


def _make_op(
    mesh: "_Mesh", i: Instruction, computation: Computation, launch: Instruction, times: int, loops: tuple[str, ...]
) -> CollectiveOp:
    kind = _kind(i) or ""
    operands = i.operands[:1] if kind == "ragged-all-to-all" else i.operands  # the other operands are offsets and sizes
    arrays = [leaf for o in operands for leaf in leaves(computation.by_name[o].type)]
    size = sum(a.bytes for a in arrays)
    if kind == "collective-permute":
        axis, group, leaves_node = mesh.moves(i)
        wire, network, hops = size if group > 1 else 0, size if leaves_node else 0, int(leaves_node)
    else:
        axis, group, local = mesh.groups(i)
        wire = _ring_bytes(kind, size, group)
        ring_network = wire / local if local < group else 0
        network = size * (group - local) / group if kind in _ALL_TO_ALLS else ring_network
        hops = _hops(kind, math.ceil(group / local))
    return CollectiveOp(
        kind=kind,
        dtype="+".join(dict.fromkeys(a.dtype for a in arrays)),
        axis=axis,
        group=group,
        count=times,
        wire_bytes=wire,
        network_bytes=network,
        source=next(filter(None, (i.source, launch.source, *(computation.by_name[o].source for o in operands))), ""),
        op_name=i.op_name or launch.op_name,
        instruction=launch.name,
        loops=loops,
        hops=hops,
        f32=sum(a.bytes for a in arrays if a.dtype == "f32") / size if size else 0.0,
    )


def _hops(kind: str, nodes: int) -> int:
    """Return the number of successive hops between nodes in a collective whose group covers `nodes` nodes."""
    if kind in _ALL_TO_ALLS:
        return min(nodes - 1, 1)
    return 2 * math.ceil(math.log2(nodes)) if kind == "all-reduce" else nodes - 1


def _ring_bytes(kind: str, size: int, n: int) -> float:
    """Return the bytes that each of n devices sends. size: bytes of a collective's operand on one device."""
    if kind == "all-gather":
        return (n - 1) * size
    if kind == "collective-broadcast":
        return size if n > 1 else 0
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n * size


def _merge_ops(ops: list[CollectiveOp]) -> CollectiveOp:
    """Return one `CollectiveOp` for the collectives that one instruction launches, with the sum of their bytes."""
    first = ops[0]
    if len({(op.kind, op.axis, op.group) for op in ops}) > 1:
        several = "; ".join(f"{op.kind} over {op.axis}" for op in ops)
        raise HloError(f"{first.instruction}: one launch of different collectives is not understood: {several}")
    wire = sum(op.wire_bytes for op in ops)
    return dataclasses.replace(
        first,
        f32=sum(op.f32 * op.wire_bytes for op in ops) / wire if wire else first.f32,
        dtype="+".join(dict.fromkeys(dtype for op in ops for dtype in op.dtype.split("+"))),
        wire_bytes=wire,
        network_bytes=sum(op.network_bytes for op in ops),
    )


# ---- Mesh axes


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _pairs(i: Instruction) -> np.ndarray:
    """Return the (source, target) pairs of a permutation, without sends to the same device. Shape [pairs, 2]."""
    text = i.attributes.get("source_target_pairs", "")
    if not _PAIRS.fullmatch(text):
        raise HloError(f"{i.name}: its source_target_pairs cannot be read: {text!r}")
    pairs = np.array(_numbers(text), int).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _groups(i: Instruction, devices: int) -> np.ndarray:
    """Return the devices of each group, shape [groups, devices in a group].

    The program has one replica, so a device's id is its partition's id.
    """
    if "channel_id" not in i.attributes:
        return np.arange(devices)[:, None]  # a group of replicas: there is only one replica
    if i.opcode.removesuffix("-start") in _REPLICA_KINDS and i.attributes.get("use_global_device_ids") != "true":
        return np.arange(devices)[None, :]  # groups of replicas with all their partitions: one group of all devices
    text = i.attributes.get("replica_groups", "{}")
    if "device_ids" in i.attributes:  # `_parse_attributes` splits this part of the value off at its comma
        text += f", device_ids={i.attributes['device_ids']}"
    if _LIST.fullmatch(text):
        listed = [_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", text)] or [tuple(range(devices))]
        groups = np.array(listed if len({len(group) for group in listed}) == 1 else [[-1]])
    elif iota := _IOTA.fullmatch(text):
        groups = _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
    elif mesh := _MESH.fullmatch(text):
        groups = _mesh_groups(mesh)
    else:
        raise HloError(f"{i.name}: its replica_groups cannot be read: {text!r}")
    if sorted(groups.ravel()) != list(range(devices)):
        raise HloError(f"{i.name}: its replica_groups do not divide the {devices} devices into equal groups: {text}")
    return groups


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Return arange(product of sizes), reshaped to `sizes`, transposed by `order`, and flattened. Shape [devices]."""
    devices = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(order)) if order else devices).ravel()


def _mesh_groups(match: re.Match[str]) -> np.ndarray:
    """Return device groups along axes of the compiler's own mesh. `'a':(2)4`: a group spans the 4 of axis a = 2 x 4 x rest."""
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(match[1])}
    if not match[2]:
        devices = np.arange(math.prod(axes.values()))
    elif order := _ORDER.fullmatch(match[2]):
        devices = _iota(order[1], order[2])
    else:
        devices = np.array(_numbers(match[2]))
    wanted = [(name, int(before or 1), int(count or axes[name])) for name, before, count in _GROUP_AXIS.findall(match[3])]
    sizes, inside = [], []  # each axis is divided where a sub-axis begins or ends
    for name, size in axes.items():
        spans = [(before, before * count) for axis, before, count in wanted if axis == name]
        for low, high in itertools.pairwise(sorted({1, size, *itertools.chain(*spans)})):
            sizes.append(high // low)
            inside.append(any(start <= low and high <= end for start, end in spans))
    outer, inner = [d for d, x in enumerate(inside) if not x], [d for d, x in enumerate(inside) if x]
    return devices.reshape(sizes).transpose(outer + inner).reshape(-1, math.prod(sizes[d] for d in inner))


def _canonical(groups: np.ndarray) -> bytes:
    """Return bytes that are equal for equal groups, in any order of groups and of devices within them."""
    groups = np.sort(groups, axis=1)
    return groups[np.argsort(groups[:, 0])].astype(np.int64).tobytes() + bytes(str(groups.shape), "ascii")


class _Mesh:
    """The run's mesh: the device groups along each combination of its axes, and the GPUs per node."""

    def __init__(self, shape: dict[str, int], gpus_per_node: int):
        self.devices, self.gpus_per_node = math.prod(shape.values()), gpus_per_node
        ids = np.arange(self.devices).reshape(tuple(shape.values()))
        names = [name for name, size in shape.items() if size > 1]
        along: dict[str, np.ndarray] = {}
        for count in range(1, len(names) + 1):
            for chosen in itertools.combinations(names, count):
                axes_last = np.moveaxis(ids, [list(shape).index(n) for n in chosen], range(-count, 0))
                along["+".join(chosen)] = axes_last.reshape(-1, math.prod(shape[n] for n in chosen))
        self.along = dict(sorted(along.items(), key=lambda item: item[1].shape[1]))  # small groups first
        self.axes = {_canonical(groups): axes for axes, groups in self.along.items()}
        self.cache: dict[str, tuple[str, int, int]] = {}

    def groups(self, i: Instruction) -> tuple[str, int, int]:
        """Return (axes, devices in a group, smallest number of devices of one group in one node) of a collective.

        Raises HloError for a group over a part of an axis whose devices are not evenly spaced along the axis.
        """
        key = str([i.attributes.get(k) for k in ("replica_groups", "device_ids", "channel_id", "use_global_device_ids")])
        key += i.opcode.removesuffix("-start")
        if key not in self.cache:
            groups = _groups(i, self.devices)
            local = min(int(np.unique(row, return_counts=True)[1].min()) for row in groups // self.gpus_per_node)
            self.cache[key] = self._axes(i, groups), groups.shape[1], local
        return self.cache[key]

    def _axes(self, i: Instruction, groups: np.ndarray) -> str:
        size = groups.shape[1]
        if size == 1:
            return ""
        if exact := self.axes.get(_canonical(groups)):
            return exact
        for axes, axis_groups in self.along.items():
            number, position = self._positions(axis_groups)
            positions = np.sort(position[groups], axis=1)
            if (number[groups] == number[groups[:, :1]]).all() and len(np.unique(np.diff(positions, axis=1))) == 1:
                return f"{axes}({size} of {axis_groups.shape[1]})"
        raise HloError(f"{i.name}: its replica_groups lie along no axes of the mesh: {i.attributes['replica_groups']}")

    def moves(self, i: Instruction) -> tuple[str, int, bool]:
        """Return (axes of the smallest group that contains every send, group size, whether a send leaves a node)."""
        moves = _pairs(i)
        if not len(moves):
            return "", 1, False
        if moves.max() >= self.devices:
            raise HloError(f"{i.name}: it names device {moves.max()}, and there are {self.devices}")
        leaves_node = bool((moves // self.gpus_per_node @ (1, -1)).any())
        fit = ((axes, groups) for axes, groups in self.along.items() if not (self._positions(groups)[0][moves] @ (1, -1)).any())
        axes, groups = next(fit)  # never fails: the group over all axes has every device
        return axes, groups.shape[1], leaves_node

    def _positions(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of the group, position in the group) of each device. groups: devices of each group."""
        number, position = np.empty(self.devices, int), np.empty(self.devices, int)
        number[groups], position[groups] = np.indices(groups.shape)
        return number, position
