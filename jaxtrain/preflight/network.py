"""How the GPUs are joined to the network: the cards beside them, their ports, and the road between."""

from collections.abc import Iterable

from jaxtrain.preflight.check import Check, Node, Subject, listed
from jaxtrain.preflight.joints import matrix
from jaxtrain.preflight.smi import Topology

NEAR = ("PIX", "PXB")  # a NIC that a GPU reaches without the CPU

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


def nics(node: Node) -> Iterable[Check]:
    found = matrix(node)
    if not found.nics:
        if node.several_nodes:
            yield NICS.note("nvidia-smi names no network card")
        return
    near = near_cards(found)
    far = [gpu for gpu, cards in near.items() if not cards]
    if not far:
        yield NICS.ok("; ".join(f"{gpu} {listed(cards, 2)}" for gpu, cards in near.items()))
        return
    text = f"none beside {listed(far, 8)}"
    # Where there is about one for each GPU, one is missing; else the machine is built (or virtualised) so.
    broken = node.several_nodes and 2 * len({card for cards in near.values() for card in cards}) >= len(near)
    yield NICS.fault(text) if broken else NICS.note(text)


def near_cards(found: Topology) -> dict[str, list[str]]:
    """GPU -> the network cards that it reaches without the CPU, by the names that the kernel has for them."""
    return {gpu: [card for n, card in found.nics.items() if found.joined.get((gpu, n)) in NEAR] for gpu in found.gpus}


def port(node: Node, card: str, what: str) -> str:
    """What the kernel tells of a card's first port: its state, as `4: ACTIVE`, or rate, as `400 Gb/sec (4X NDR)`; or ""."""
    return (node.machine.read(f"/sys/class/infiniband/{card}/ports/1/{what}") or "").strip()


def active_cards(node: Node) -> list[str]:
    """The cards near the GPUs that the run may use, whose ports are up."""
    cards = dict.fromkeys(card for cards in near_cards(matrix(node)).values() for card in cards)
    return [card for card in cards if "ACTIVE" in port(node, card, "state")]


def ports(node: Node) -> Iterable[Check]:
    """Of the cards that are near a GPU. One that is down matters where the run crosses nodes and a GPU has no other."""
    near = near_cards(matrix(node))
    states = {card: port(node, card, "state") for cards in near.values() for card in cards}
    told = {card: state for card, state in states.items() if state}
    if not told:
        return
    down = [f"{card} {state.partition(': ')[2] or state}" for card, state in told.items() if "ACTIVE" not in state]
    cut = [gpu for gpu, cards in near.items() if cards and not any("ACTIVE" in told.get(card, "ACTIVE") for card in cards)]
    if not down:
        rates = {port(node, card, "rate") for card in told}
        yield PORTS.ok(f"{len(told)} active, {listed(sorted(rates))}")
    elif cut and node.several_nodes:
        yield PORTS.fault(f"{listed(down)}; {listed(cut)} has no other")
    else:
        why = "each GPU beside one has another" if node.several_nodes else "a run of one node has no need of them"
        yield PORTS.note(f"{listed(down)}; {why}")


def direct(node: Node) -> Iterable[Check]:
    if not node.several_nodes:
        return
    modules = node.machine.read("/proc/modules")
    if modules is None:
        yield DIRECT.unknown("/proc/modules cannot be read")
        return
    loaded = any(line.startswith(("nvidia_peermem ", "nv_peer_mem ")) for line in modules.splitlines())
    yield DIRECT.ok("nvidia_peermem") if loaded else DIRECT.note("no nvidia_peermem; whether NCCL uses DMA-BUF its log tells")


PARTS = ((NICS, nics), (PORTS, ports), (DIRECT, direct))
