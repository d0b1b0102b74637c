"""How the GPUs are joined to each other, to the CPUs and to the network."""

from collections import Counter
from collections.abc import Iterable

from jaxtrain.preflight import smi
from jaxtrain.preflight.boards import SWITCH
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.smi import Topology

# What nvidia-smi's letters mean, as its own legend has it.
PATHS = {
    "SYS": "across the CPUs' interconnect",
    "NODE": "across PCIe host bridges of one CPU",
    "PHB": "across one PCIe host bridge, through the CPU",
    "PXB": "across several PCIe switches",
    "PIX": "across one PCIe switch",
}
GOOD = ("Completed", "Success")  # fabric.state and fabric.status
NEAR = ("PIX", "PXB")  # a NIC that a GPU reaches without the CPU

TOPOLOGY = Subject(
    "topology",
    "every pair of GPUs joined by NVLink as the board allows",
    "Collectives go at the pace of the slowest pair: PCIe instead of NVLink makes them some ten times slower, "
    "without an error.",
    "Reboot the node, and see that nvidia-fabricmanager runs and has the driver's very version; if the pair "
    "stays on PCIe, have the "
    "board looked at (nvidia-smi topo -m). In a container or VM: give it all GPUs of the board, and no PCIe "
    "passthrough without NVSwitch.",
)
BRIDGE_FIX = (
    "Power the node off, and see that the bridge sits on all of its GPUs; if it does, replace it (nvidia-smi topo -m shows it)."
)
NVLINK = Subject(
    "NVLink",
    "all links of every GPU active",
    "A link that is down takes its share of the bandwidth from every collective that this GPU takes part in, and "
    "that is all of them.",
    "nvidia-smi nvlink -s shows it; reset the GPUs or reboot. If it stays down: reseat or replace the GPU, the "
    "bridge or the board.",
)
ERRORS = Subject(
    "NVLink errors",
    "no link had to recover since the driver was loaded",
    "A link that recovers stalls its collective for milliseconds each time, and is about to fail.",
    "Watch nvidia-smi nvlink -e during a run; if it counts on, have the GPU or the board looked at.",
)
FABRIC = Subject(
    "fabric",
    "the GPUs are registered with the NVSwitches",
    "Without Fabric Manager the switches carry nothing: CUDA fails to start (error 802), or falls back to PCIe.",
    "sudo systemctl restart nvidia-fabricmanager, whose version must be the driver's; its log says why it does not come up.",
)
NUMA = Subject(
    "NUMA",
    "the NUMA node beside each GPU is known",
    "Copies between host and GPU that cross the CPUs' interconnect are slower, and NCCL places its threads by it.",
    "In a VM: pass the host's topology through. Otherwise: enable NUMA in the firmware.",
)
NICS = Subject(
    "GPU and NIC",
    "a network card behind the same PCIe switch as each GPU (PIX or PXB)",
    "Only such a card is reached by GPUDirect RDMA at full rate; otherwise what goes between nodes passes the CPU.",
    "Look for a card that is missing or whose port is down (ibstat); in a VM, have the host's PCIe topology "
    "passed through (NCCL_TOPO_FILE).",
)
PORTS = Subject(
    "InfiniBand",
    "the ports of the cards beside the GPUs are up",
    "NCCL leaves out a port that is down, and its GPUs share another one's.",
    "Look at cable and switch port (ibstat, ibdiagnet), and at the subnet manager.",
)
DIRECT = Subject(
    "GPUDirect RDMA",
    "nvidia_peermem loaded, or DMA-BUF",
    "Without it what goes between nodes is copied through the host's memory, at about half the rate.",
    "sudo modprobe nvidia_peermem. With the open kernel modules and Linux 5.12 or later NCCL uses DMA-BUF, which "
    "needs no module.",
)


def checks(node: Node) -> Iterable[Check]:
    answer = node.machine.run(smi.TOPOLOGY)
    found = smi.topology(answer.out) if answer.told else Topology({}, {}, {})
    if not found.gpus and node.gpus.count > 1:
        yield TOPOLOGY.unknown(f"nvidia-smi topo -m: {answer.why}" if not answer.told else "nvidia-smi topo -m has no matrix")
    elif node.gpus.count > 1:
        yield topology(node, found)
        yield numa(node, found)
    yield links(node)
    yield errors(node)
    if node.board and node.board.joined == SWITCH:
        yield fabric(node)
    if found.nics or node.several_nodes:
        yield nics(node, found)
        yield from ports(node, found)
    if node.several_nodes:
        yield direct(node)


def topology(node: Node, found: Topology) -> Check:
    pairs, board = found.pairs(), node.board
    counted = ", ".join(f"{n} pairs {how}" for how, n in Counter(pairs.values()).most_common())
    if board is None:
        text = f"{counted}; what this board should have is not known"
        return (
            TOPOLOGY.ok(text) if len(set(pairs.values())) == 1 else TOPOLOGY.note(text, "Compare it with the board's manual.")
        )
    if board.joined == SWITCH:
        wanted = f"NV{board.links}"
        wrong = {pair: how for pair, how in pairs.items() if how != wanted}
        return TOPOLOGY.fault(named(wrong, wanted)) if wrong else TOPOLOGY.ok(f"all pairs {wanted}")
    partners = {gpu: sorted(how for pair, how in pairs.items() if gpu in pair and how.startswith("NV")) for gpu in found.gpus}
    sizes = {len(hows) + 1 for hows in partners.values()}
    if sizes == {1}:
        return TOPOLOGY.note(
            f"{counted}: no NVLink bridges", "Nothing, if none were bought; a bridge of GPUs makes collectives faster."
        )
    size = max(sizes)
    wanted = f"NV{board.links // (size - 1)}"
    bare = [gpu for gpu, hows in partners.items() if hows != [wanted] * (size - 1)]
    if size not in board.bridged or bare:
        have = [(gpu, f"{', '.join(partners[gpu]) or 'no NVLink'}, not {wanted} to {size - 1} others") for gpu in bare]
        return TOPOLOGY.fault(grouped(have) or f"bridges of {size}: {counted}", BRIDGE_FIX)
    return TOPOLOGY.ok(f"bridges of {size}, {wanted} within each")


def named(wrong: dict[tuple[str, str], str], wanted: str) -> str:
    """GPU0-GPU3 PHB (across one PCIe host bridge, through the CPU), and what it should be."""
    hows = {how: [f"{a}-{b}" for (a, b), h in wrong.items() if h == how] for how in dict.fromkeys(wrong.values())}
    parts = [f"{listed(at)} {how}" + (f" ({PATHS[how]})" if how in PATHS else "") for how, at in hows.items()]
    return f"{'; '.join(parts)}, not {wanted}"


def numa(node: Node, found: Topology) -> Check:
    several = "-" in (node.machine.read("/sys/devices/system/node/online") or "")
    if not several:
        return NUMA.ok("one NUMA node")
    lost = [gpu for gpu in found.gpus if gpu not in found.numa]
    if lost:
        return NUMA.note(f"not told of {listed(lost)}")
    beside = {n: [g for g in found.gpus if found.numa[g] == n] for n in sorted(set(found.numa.values()))}
    return NUMA.ok("; ".join(f"{n}: {listed(gpus, 8)}" for n, gpus in beside.items()))


def links(node: Node) -> Check:
    answer = node.machine.run(smi.LINKS)
    found = smi.links(answer.out)
    active = {gpu: sum(rate is not None for rate in of.values()) for gpu, of in found.items()}
    if not found or (not any(active.values()) and (node.board is None or node.board.joined != SWITCH)):
        return (
            NVLINK.unknown(answer.why)
            if not answer.told and not found
            else NVLINK.note("none", "Nothing, if none were bought.")
        )
    whole = node.board.links if node.board else max(active.values())
    down = []
    for gpu, n in active.items():
        dead = [str(link) for link, rate in found[gpu].items() if rate is None]
        if n < whole:
            down.append(f"GPU{gpu} {n} of {whole}" + (f" (link {listed(dead)} down)" if dead and n else ""))
    if down:
        return NVLINK.fault(listed(down))
    rates = sorted({rate for of in found.values() for rate in of.values() if rate})
    if len(rates) > 1:
        return NVLINK.fault(f"links at different rates: {listed([f'{rate:g} GB/s' for rate in rates])}")
    return NVLINK.ok(f"{whole} of {whole} on every GPU, {rates[0]:g} GB/s each")


def errors(node: Node) -> Check:
    answer = node.machine.run(smi.LINK_ERRORS)
    found = smi.link_errors(answer.out)
    if not found:
        return ERRORS.unknown("nvidia-smi nvlink -e: " + (answer.why if not answer.told else "no counters"))

    def counted(*kinds: str) -> list[str]:
        return [f"GPU{g} link {n}: {kind} {times}" for (g, n, kind), times in found.items() if kind in kinds and times]

    if recovered := counted("Recovery"):
        return ERRORS.fault(listed(recovered))
    # Corrected by sending again: a few over weeks are nothing.
    again = counted("Replay", "CRC")
    return ERRORS.note(listed(again)) if again else ERRORS.ok("none")


def fabric(node: Node) -> Check:
    answer = node.machine.run(smi.FABRIC_STATE)
    states = [(row["index"], row["fabric.state"], row["fabric.status"]) for row in smi.rows(answer, smi.FABRIC)]
    told = [(i, state, status) for i, state, status in states if state]
    if not told:
        return FABRIC.unknown(answer.why if not answer.told else "these GPUs do not tell")
    wrong = [(f"GPU{i}", f"{state}, {status or 'no status'}") for i, state, status in told if (state, status) != GOOD]
    return FABRIC.fault(grouped(wrong)) if wrong else FABRIC.ok(", ".join(GOOD))


def nics(node: Node, found: Topology) -> Check:
    if not found.nics:
        return NICS.note("nvidia-smi names no network card")
    near = {gpu: [n for n in found.nics if found.joined.get((gpu, n)) in NEAR] for gpu in found.gpus}
    far = [gpu for gpu, cards in near.items() if not cards]
    if not far:
        return NICS.ok("; ".join(f"{gpu} {listed([found.nics[n] for n in cards], 2)}" for gpu, cards in near.items()))
    text = f"none beside {listed(far, 8)}"
    # Where other GPUs of the node have theirs, one is missing; where none has, the machine is built (or virtualised) so.
    broken = node.several_nodes and len(far) < len(near)
    return NICS.fault(text) if broken else NICS.note(text)


def ports(node: Node, found: Topology) -> Iterable[Check]:
    """The cards that are near a GPU; one that is down only matters where the run crosses nodes."""
    cards = [name for n, name in found.nics.items() if any(found.joined.get((gpu, n)) in NEAR for gpu in found.gpus)]
    states = {card: node.machine.read(f"/sys/class/infiniband/{card}/ports/1/state") for card in cards}
    told = {card: state.strip() for card, state in states.items() if state}
    if not told:
        return
    down = [f"{card} {state.partition(': ')[2] or state}" for card, state in told.items() if "ACTIVE" not in state]
    if down:
        yield (
            PORTS.fault(listed(down))
            if node.several_nodes
            else PORTS.note(f"{listed(down)}; a run of one node has no need of them")
        )
        return
    rates = {(node.machine.read(f"/sys/class/infiniband/{card}/ports/1/rate") or "").strip() for card in told}
    yield PORTS.ok(f"{len(told)} active, {listed(sorted(rates))}")


def direct(node: Node) -> Check:
    modules = node.machine.read("/proc/modules")
    if modules is None:
        return DIRECT.unknown("/proc/modules cannot be read")
    loaded = any(line.startswith(("nvidia_peermem ", "nv_peer_mem ")) for line in modules.splitlines())
    return DIRECT.ok("nvidia_peermem") if loaded else DIRECT.note("no nvidia_peermem; whether NCCL uses DMA-BUF its log tells")
