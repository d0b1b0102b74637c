"""Checks of the links: NVLink and NVSwitch between GPUs, and the network cards (NICs) near the GPUs.

A NIC is near a GPU if only PCIe switches are between them (PIX or PXB in `nvidia-smi topo -m`).
"""

from collections import Counter

from jaxtrain.node.facts import INFINIBAND, TOPOLOGY
from jaxtrain.node.gpus import find_assigner
from jaxtrain.node.machine import SWITCH, Board, Row
from jaxtrain.node.table import (
    NOT_REPORTED,
    Context,
    Table,
    Verdict,
    each_gpu,
    fault,
    grouped,
    listed,
    name,
    note,
    ok,
    unknown,
    worst,
)

CHECKS = Table()

# nvidia-smi's abbreviation of a connection -> its meaning, by nvidia-smi's own legend.
CONNECTIONS = {
    "SYS": "across the CPUs' interconnect",
    "NODE": "across PCIe host bridges of one CPU",
    "PHB": "across one PCIe host bridge, through the CPU",
    "PXB": "across several PCIe switches",
    "PIX": "across one PCIe switch",
}
FABRIC_OK = ("Completed", "Success")  # good values of (fabric.state, fabric.status)
ONE_GPU = "Nothing: this run has one GPU and uses none of its links."


def has_switches(c: Context) -> bool:
    return c.board is not None and c.board.joined == SWITCH


def without_switches(c: Context) -> bool:
    """Return whether all pairs are connected as on a board of four GPUs, which has no switches.

    On such a board, a third of a GPU's links connect it to each other GPU: NV6 on HGX H100 4-GPU, NV4 on HGX A100 4-GPU.
    The source is issue 1617 of NVIDIA/nccl.
    """
    pairs = set(c.topology.pairs.values())
    return c.board is not None and c.gpus.on_node <= 4 and pairs == {f"NV{c.board.links // 3}"}


@CHECKS.add(
    "topology",
    expected="every pair of GPUs joined by NVLink as the board allows",
    why="Collectives run at the pace of the slowest pair: PCIe instead of NVLink makes them some ten times slower, without an "
    "error.",
    fix="Reboot the node, and see that nvidia-fabricmanager runs and has exactly the driver's version; if the pair stays on "
    "PCIe, have the board inspected (nvidia-smi topo -m). In a container or VM: give it all GPUs of the board, and no PCIe "
    "passthrough without NVSwitch.",
)
def topology(c: Context) -> Verdict | None:
    if c.gpus.count < 2:
        return None
    if not c.topology.near_nics:
        return unknown(f"nvidia-smi topo -m: {c.facts.run(TOPOLOGY).error or 'it has no matrix'}")
    pairs = c.topology.pairs
    counts = ", ".join(f"{n} pairs {connection}" for connection, n in Counter(pairs.values()).most_common())
    if c.board is None:
        text = f"{counts}; the topology of this board is not known"
        return ok(text) if len(set(pairs.values())) == 1 else note(text, fix="Compare it with the board's manual.")
    if not has_switches(c):
        return bridges(c, c.board, counts)
    if without_switches(c):
        return ok(f"all pairs {next(iter(pairs.values()))}, without switches")
    expected = f"NV{c.board.links}"
    wrong = {n: [f"{a}-{b}" for (a, b), m in pairs.items() if m == n] for n in pairs.values() if n != expected}
    texts = [f"{listed(at)} {n}" + (f" ({CONNECTIONS[n]})" if n in CONNECTIONS else "") for n, at in wrong.items()]
    return fault(f"{'; '.join(texts)}, not {expected}") if wrong else ok(f"all pairs {expected}")


def bridges(c: Context, board: Board, counts: str) -> Verdict:
    """Return the verdict on the NVLink bridges of a board, which must all connect the same number of GPUs.

    Args:
        counts: text with the number of GPU pairs of each connection.
    """
    pairs = c.topology.pairs
    partners = {
        gpu: sorted(n for pair, n in pairs.items() if gpu in pair and n.startswith("NV")) for gpu in c.topology.near_nics
    }
    size = max(len(connections) + 1 for connections in partners.values())
    if size == 1:
        return note(f"{counts}: no NVLink bridges", fix="Nothing, if none were bought; a bridge makes collectives faster.")
    sizes = {f"NV{board.links // (n - 1)}": n for n in board.bridged}
    full = max((sizes.get(connection, 0) for connection in pairs.values()), default=0)
    # If the run has only some GPUs of the node, a bridge may connect them to GPUs of another run.
    part = c.gpus.others or find_assigner(c.facts.environ)[1] or c.gpus.on_node < full
    if part and all(connection in sizes for connections in partners.values() for connection in connections):
        return note(f"{counts}, of bridges of {full}", fix="Nothing; GPUs of one bridge are faster together.")
    expected = f"NV{board.links // (size - 1)}"
    wrong = [
        (gpu, f"{', '.join(connections) or 'no NVLink'}, not {expected} to {size - 1} others")
        for gpu, connections in partners.items()
        if connections != [expected] * (size - 1)
    ]
    if size not in board.bridged or wrong:
        fix = (
            "Power the node off, and see that the bridge sits on all of its GPUs (nvidia-smi topo -m); if it does, replace it."
        )
        return fault(grouped(wrong) or f"bridges of {size}: {counts}", fix=fix)
    return ok(f"bridges of {size}, {expected} within each")


@CHECKS.add(
    "NVLink",
    expected="all links of every GPU active",
    why="A link that is down reduces the bandwidth of every collective of its GPU, and every collective uses all GPUs.",
    fix="nvidia-smi nvlink -s shows it; reset the GPUs or reboot. If it stays down: reseat or replace the GPU, the bridge or "
    "the board.",
)
def nvlink(c: Context) -> Verdict:
    links = {name(row): row["nvlinks"] for row in c.gpus.rows if "nvlinks" in row}
    if not links:
        return unknown(next((why for row in c.gpus.rows if (why := row["refused"].get("nvlinks"))), NOT_REPORTED))
    active = {gpu: len(each["up"]) for gpu, each in links.items()}
    if not any(active.values()) and (c.gpus.count == 1 or not has_switches(c)):
        return note("none", fix="Nothing, if none were bought, or the GPU is alone in a virtual machine.")
    full = c.board.links if c.board else max(active.values())
    verdicts = {}
    for gpu, each in links.items():
        count, down = active[gpu], [str(link) for link in each["down"]]
        if not count and c.board is None:
            verdicts[gpu] = note(f"none, and {full} on others", fix="Nothing, if their bridges are meant so.")
        elif count < full or down and c.board is None:
            which = f" (link {listed(down)} down)" if down and count else ""
            seen = f"{count} of {max(full, count + len(down))}{which}"
            verdicts[gpu] = fault(seen) if c.gpus.count > 1 else note(seen, fix=ONE_GPU)
    if verdicts:
        return worst(verdicts, "")
    rates = [f"{rate:g} GB/s" for rate in sorted({rate for each in links.values() for rate in each["gb_s"]})]
    if len(rates) > 1:
        return fault(f"links at different rates: {listed(rates)}")
    return ok(f"{full} of {full} on every GPU{''.join(f', {rate} each' for rate in rates)}")


@CHECKS.add(
    "NVLink errors",
    expected="no link had to recover since the driver was loaded",
    why="A link that recovers stalls its collective for milliseconds each time, and often fails soon after.",
    fix="Watch nvidia-smi nvlink -e during a run; if the count rises, have the GPU or the board inspected.",
)
@each_gpu("nvlink_errors")
def nvlink_errors(c: Context, row: Row) -> Verdict:
    texts = {kind: [f"link {at}: {kind} {n}" for at, n in links.items()] for kind, links in row["nvlink_errors"].items()}
    if recovered := texts.pop("recovery", []):
        return fault(listed(recovered)) if c.gpus.count > 1 else note(listed(recovered), fix=ONE_GPU)
    # Resending corrects the other errors. A few in some weeks are normal.
    return note(listed(sum(texts.values(), []))) if texts else ok("none")


@CHECKS.add(
    "fabric",
    expected="the GPUs are registered with the NVSwitches",
    why="Without Fabric Manager the switches are unusable: CUDA fails to start (error 802), or falls back to PCIe.",
    fix="sudo systemctl restart nvidia-fabricmanager, whose version must be the driver's; its log has the reason if it does "
    "not start.",
)
def fabric(c: Context) -> Verdict | None:
    return registered(c) if has_switches(c) else None


@each_gpu("fabric")
def registered(c: Context, row: Row) -> Verdict:
    """Return the verdict on a GPU's registration with the NVSwitches."""
    state, status = row["fabric"]["state"], row["fabric"]["status"]
    if (state, status) == FABRIC_OK:
        return ok(", ".join(FABRIC_OK))
    alone = c.gpus.count == 1 and not row.get("nvlinks", {}).get("up")
    if alone or without_switches(c):
        return note(f"{state}; no switch joins these GPUs", fix="Nothing.")
    return fault(f"{state} ({status})" if status else state)


@CHECKS.add(
    "GPU and NIC",
    expected="a network card behind the same PCIe switch as each GPU (PIX or PXB)",
    why="GPUDirect RDMA reaches only such a card at full rate; otherwise traffic between nodes passes the CPU.",
    fix="Look for a card that is missing or whose port is down (ibstat); in a VM, have the host's PCIe topology passed through "
    "(NCCL_TOPO_FILE).",
)
def nics(c: Context) -> Verdict | None:
    if not c.topology.has_nics:
        return note("nvidia-smi names no network card") if c.several_nodes else None
    near = c.topology.near_nics
    far = [gpu for gpu, cards in near.items() if not cards]
    if not far:
        return ok("; ".join(f"{gpu} {listed(cards, 2)}" for gpu, cards in near.items()))
    # If there is about one card for each GPU, a card is missing. With fewer cards, the machine is built (or virtualized) so.
    missing = 2 * len({card for cards in near.values() for card in cards}) >= len(near)
    text = f"none near {listed(far, 8)}"
    return fault(text) if c.several_nodes and missing else note(text)


def port(c: Context, card: str, what: str) -> str:
    """Return the "state" (`4: ACTIVE`) or "rate" (`400 Gb/sec (4X NDR)`) of a NIC's first port; "" if it is unknown."""
    return c.facts.read(f"{INFINIBAND}/{card}/ports/1/{what}")


def active_nics(c: Context) -> list[str]:
    """Return those NICs near the GPUs whose first port is up."""
    cards = dict.fromkeys(card for cards in c.topology.near_nics.values() for card in cards)
    return [card for card in cards if "ACTIVE" in port(c, card, "state")]


@CHECKS.add(
    "InfiniBand",
    expected="the ports of the cards near the GPUs are up",
    why="NCCL leaves out a port that is down, and its GPUs share another one's.",
    fix="Look at cable and switch port (ibstat, ibdiagnet), and at the subnet manager.",
)
def infiniband(c: Context) -> Verdict | None:
    """Return the verdict on the first ports of the NICs near the GPUs; None if no such port is known.

    The verdict is a fault if the run uses several nodes and all ports near one GPU are down. Otherwise a port
    that is down is a note.
    """
    near = c.topology.near_nics
    states = {card: state for cards in near.values() for card in cards if (state := port(c, card, "state"))}
    if not states:
        return None
    down = [f"{card} {state.partition(': ')[2] or state}" for card, state in states.items() if "ACTIVE" not in state]
    cut = [gpu for gpu, cards in near.items() if cards and not any("ACTIVE" in states.get(n, "ACTIVE") for n in cards)]
    if not down:
        return ok(f"{len(states)} active, {listed(sorted({port(c, card, 'rate') for card in states}))}")
    if cut and c.several_nodes:
        return fault(f"{listed(down)}; {listed(cut)} has no other")
    why = "each GPU near one has another" if c.several_nodes else "a run of one node does not use them"
    return note(f"{listed(down)}; {why}")
