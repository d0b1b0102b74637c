"""How the GPUs are joined to each other and to the CPUs."""

from collections import Counter
from collections.abc import Iterable

from jaxtrain.preflight import smi
from jaxtrain.preflight.boards import SWITCH, Board
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.health import given_by
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
ALONE = "Nothing: this run has one GPU, and nothing goes over its links."

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


def matrix(node: Node) -> Topology:
    """nvidia-smi's matrix, of the GPUs that the run may use; empty where there is none."""
    answer = node.machine.run(smi.TOPOLOGY)
    return smi.topology(answer.out).of(node.gpus.indices) if answer.told else Topology({}, {}, {})


def topology(node: Node) -> Iterable[Check]:
    if node.gpus.count < 2:
        return
    found = matrix(node)
    if found.gpus:
        yield joined(node, found)
    else:
        answer = node.machine.run(smi.TOPOLOGY)
        yield TOPOLOGY.unknown(f"nvidia-smi topo -m: {answer.why}" if not answer.told else "nvidia-smi topo -m has no matrix")


def direct_pairs(node: Node) -> str:
    """What joins the pairs of a board of four, which has no switches: each GPU has a third of its links to each of the others
    (NVIDIA/nccl, issue 1617: NV6 on HGX H100 4-GPU, NV4 on HGX A100 4-GPU). Empty for a larger board."""
    return f"NV{node.board.links // 3}" if node.board and node.gpus.on_node <= 4 else ""


def joined(node: Node, found: Topology) -> Check:
    pairs, board = found.pairs(), node.board
    counted = ", ".join(f"{n} pairs {how}" for how, n in Counter(pairs.values()).most_common())
    if board is None:
        text = f"{counted}; what this board should have is not known"
        return (
            TOPOLOGY.ok(text) if len(set(pairs.values())) == 1 else TOPOLOGY.note(text, "Compare it with the board's manual.")
        )
    if board.joined == SWITCH:
        wanted = f"NV{board.links}"
        if direct_pairs(node) and set(pairs.values()) == {direct_pairs(node)}:
            return TOPOLOGY.ok(f"all pairs {direct_pairs(node)}, without switches")
        wrong = {pair: how for pair, how in pairs.items() if how != wanted}
        return TOPOLOGY.fault(named(wrong, wanted)) if wrong else TOPOLOGY.ok(f"all pairs {wanted}")
    return bridged(node, board, found, counted)


def bridged(node: Node, board: Board, found: Topology, counted: str) -> Check:
    pairs = found.pairs()
    partners = {gpu: sorted(how for pair, how in pairs.items() if gpu in pair and how.startswith("NV")) for gpu in found.gpus}
    sizes = {len(hows) + 1 for hows in partners.values()}
    if sizes == {1}:
        return TOPOLOGY.note(
            f"{counted}: no NVLink bridges", "Nothing, if none were bought; a bridge of GPUs makes collectives faster."
        )
    widths = {f"NV{board.links // (size - 1)}": size for size in board.bridged}
    whole = max((widths.get(how, 0) for how in pairs.values()), default=0)
    # Where the run has a part of the node, a bridge may join its GPUs to others that are out of sight.
    part = node.gpus.others or given_by(node.machine.environ())[1] or node.gpus.on_node < whole
    if part and all(how in widths for hows in partners.values() for how in hows):
        return TOPOLOGY.note(f"{counted}, of bridges of {whole}", "Nothing; GPUs of one bridge are faster together.")
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


def numa(node: Node) -> Iterable[Check]:
    found = matrix(node)
    if node.gpus.count > 1 and found.gpus:
        yield beside(node, found)


def beside(node: Node, found: Topology) -> Check:
    several = "-" in (node.machine.read("/sys/devices/system/node/online") or "")
    if not several:
        return NUMA.ok("one NUMA node")
    lost = [gpu for gpu in found.gpus if gpu not in found.numa]
    if lost:
        return NUMA.note(f"not told of {listed(lost)}")
    near = {n: [g for g in found.gpus if found.numa[g] == n] for n in sorted(set(found.numa.values()))}
    return NUMA.ok("; ".join(f"{n}: {listed(gpus, 8)}" for n, gpus in near.items()))


def links(node: Node) -> Check:
    answer = node.machine.run(smi.LINKS)
    found = node.gpus.mine(smi.links(answer.out))
    active = {gpu: sum(rate is not None for rate in of.values()) for gpu, of in found.items()}
    switched = node.board is not None and node.board.joined == SWITCH
    if not found and (switched or not answer.told):
        return NVLINK.unknown(answer.why if not answer.told else "nvidia-smi nvlink -s names no GPU")
    if not any(active.values()) and (node.gpus.count == 1 or not switched):
        return NVLINK.note("none", "Nothing, if none were bought, or the GPU is alone in a virtual machine.")
    whole = node.board.links if node.board else max(active.values())
    down, bare = [], []
    for gpu, n in active.items():
        dead = [str(link) for link, rate in found[gpu].items() if rate is None]
        if n == 0 and node.board is None:
            bare.append(f"GPU{gpu}")  # a bridge joins the others, perhaps
        elif n < whole or dead and node.board is None:
            down.append(f"GPU{gpu} {n} of {max(whole, n + len(dead))}" + (f" (link {listed(dead)} down)" if dead and n else ""))
    if down:
        return NVLINK.fault(listed(down)) if node.gpus.count > 1 else NVLINK.note(listed(down), ALONE)
    if bare:
        return NVLINK.note(f"none on {listed(bare, 8)}, and {whole} on others", "Nothing, if their bridges are meant so.")
    rates = sorted({rate for of in found.values() for rate in of.values() if rate})
    if len(rates) > 1:
        return NVLINK.fault(f"links at different rates: {listed([f'{rate:g} GB/s' for rate in rates])}")
    return NVLINK.ok(f"{whole} of {whole} on every GPU, {rates[0]:g} GB/s each")


def errors(node: Node) -> Check:
    answer = node.machine.run(smi.LINK_ERRORS)
    found = {at: times for at, times in smi.link_errors(answer.out).items() if at[0] in node.gpus.indices}
    if not found:
        return ERRORS.unknown("nvidia-smi nvlink -e: " + (answer.why if not answer.told else "no counters"))

    def counted(*kinds: str) -> list[str]:
        return [f"GPU{g} link {n}: {kind} {times}" for (g, n, kind), times in found.items() if kind in kinds and times]

    if recovered := counted("Recovery"):
        return ERRORS.fault(listed(recovered)) if node.gpus.count > 1 else ERRORS.note(listed(recovered), ALONE)
    # Corrected by sending again: a few over weeks are nothing.
    again = counted("Replay", "CRC")
    return ERRORS.note(listed(again)) if again else ERRORS.ok("none")


def fabric(node: Node) -> Iterable[Check]:
    if not node.board or node.board.joined != SWITCH:
        return
    answer = node.machine.run(smi.FABRIC_STATE)
    rows = {int(row["index"] or 0): row for row in smi.rows(answer, smi.FABRIC)}
    told = [
        (gpu, row["fabric.state"], row["fabric.status"]) for gpu, row in node.gpus.mine(rows).items() if row["fabric.state"]
    ]
    wrong = [(f"GPU{i}", f"{state}, {status or 'no status'}") for i, state, status in told if (state, status) != GOOD]
    pairs = set(matrix(node).pairs().values())
    linked = any(rate for of in node.gpus.mine(smi.links(node.machine.run(smi.LINKS).out)).values() for rate in of.values())
    if not told:
        yield FABRIC.unknown(answer.why if not answer.told else "these GPUs do not tell")
    elif not wrong:
        yield FABRIC.ok(", ".join(GOOD))
    elif (direct_pairs(node) and pairs == {direct_pairs(node)}) or (node.gpus.count == 1 and not linked):
        yield FABRIC.note(f"{grouped(wrong)}; no switch joins these GPUs", "Nothing.")
    else:
        yield FABRIC.fault(grouped(wrong))


PARTS = ((TOPOLOGY, topology), (NUMA, numa), (NVLINK, links), (ERRORS, errors), (FABRIC, fabric))
