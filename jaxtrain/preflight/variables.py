"""The environment that a run would start in: variables that change it by accident, hide GPUs, or lead its processes astray."""

import ipaddress
from collections.abc import Iterable, Mapping

from jaxtrain import environment
from jaxtrain.config import Problem
from jaxtrain.distributed.cluster import node_names
from jaxtrain.hardware import Devices
from jaxtrain.preflight import smi
from jaxtrain.preflight.check import Check, Node, Subject, listed
from jaxtrain.preflight.smi import number

CONNECTIONS, MNNVL, VISIBLE = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MNNVL_ENABLE", "CUDA_VISIBLE_DEVICES"
SHELL = "environment"  # what environment.overlay calls all variables together that nobody has named
RACKS = ("GB200", "GB300")  # whose NVLink goes beyond the node

STALE = Subject(
    "variables",
    "none from the shell that changes a run and that the config does not name",
    "Two people who start one config should get one run; a variable left over from somebody's experiment makes "
    "it another, or a slow one.",
    "unset it, or name it in env.inherit (the shell's value) or env.set (one of the config's own).",
)
BUDGET = Subject(
    "memory variables",
    "none that contradicts train.memory_fraction",
    "The plan and the check before the first step go by that budget; JAX refuses two names for it, or takes "
    "another part of the memory.",
    "Unset them, and set train.memory_fraction.",
)
QUEUES = Subject(
    CONNECTIONS,
    "unset",
    "With 1 copies, kernels and collectives are put in one queue, in the order of their launch: it may help or "
    "hurt, and is part of the run.",
    f"unset {CONNECTIONS}, unless it is there on purpose; jaxtrain.bench --suite=node compares the two.",
)
FABRICS = Subject(
    MNNVL,
    "not 1: NVLink ends at the node",
    "NCCL then looks for NVLink between nodes, which only racks such as GB200 NVL72 have, and fails to start.",
    f"unset {MNNVL}.",
)
PROXY = Subject(
    "proxy",
    "no proxy between the run's processes",
    "gRPC, by which the processes find each other, goes through http_proxy and https_proxy: they wait for "
    "process 0 until they give up.",
    "Add the nodes to no_proxy (and NO_PROXY), or unset the proxy for the run.",
)
DEVICES = Subject(
    VISIBLE,
    "unset, or the same for all processes of a node",
    "A GPU that is called 0 in every process has no number that the node, NVML and the receipt share; jaxtrain "
    "tells processes their "
    "GPUs by --local-devices, which then names GPUs that are not there.",
    "unset CUDA_VISIBLE_DEVICES in the processes. Slurm: srun --gpus-per-node=8 (or --gres), not --gpus-per-task "
    "or --gpu-bind.",
)


def overlay(node: Node) -> Iterable[Check]:
    """What the run's own rules for its environment refuse, and the variables that those rules leave to somebody's judgement."""
    environ = node.machine.environ()
    beyond = environ.get(MNNVL) == "1" and not any(rack in name for rack in RACKS for name in node.gpus.names)
    others = {name: value for name, value in environ.items() if not (beyond and name == MNNVL)}  # that has a line of its own
    wrong = problems(node, others)
    own = {p.key for p in wrong if p.key in environ and p.key not in environment.changing(environ)}
    stale = [p for p in wrong if p.key not in own]
    yield verdict(STALE, stale)
    yield verdict(BUDGET, [p for p in wrong if p.key in own])
    if environ.get(CONNECTIONS) and not any(f"{CONNECTIONS}=" in named(p) for p in stale):
        yield QUEUES.note(f"{environ[CONNECTIONS]}, as env.inherit or env.set has it", "Nothing, if it is meant.")
    elif not environ.get(CONNECTIONS):
        yield QUEUES.ok("unset")
    if beyond:
        yield FABRICS.fault("1")


def problems(node: Node, environ: Mapping[str, str]) -> list[Problem]:
    """What the run itself would refuse when it starts: the very same rules."""
    if not node.gpus.rows:
        return []
    first = node.gpus.rows[0]
    sm, mib = round(10 * (number(first, "compute_cap") or 0)), number(first, "memory.total")
    # Where the memory is not told, the budget is part of some number: names are looked at all the same.
    devices = Devices("gpu", node.gpus.names[0], node.gpus.count, (mib or 1024) / 1024, "nvidia-smi", sm)
    found = environment.overlay(node.asked.run, devices, environ)[1]
    return [p for p in found if p.key in (*environ, SHELL)]


def verdict(subject: Subject, wrong: list[Problem]) -> Check:
    if not wrong:
        return subject.ok("none")
    return subject.fault(listed([named(p) for p in wrong]), " ".join(dict.fromkeys(p.remedy for p in wrong)))


def named(problem: Problem) -> str:
    """The variables that a problem is about, as NAME=VALUE."""
    return str(problem.value) if problem.key == SHELL else f"{problem.key}={problem.value}"


def proxy(node: Node) -> Check:
    environ = node.machine.environ()
    names = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
    found = {name: environ[name] for each in names for name in (each, each.upper()) if environ.get(name)}
    if not found:
        return PROXY.ok("none set")
    seen = listed([f"{name}={value}" for name, value in found.items()])
    cluster = node.asked.cluster
    if cluster is None:
        return PROXY.note(f"{seen}; a run of one process has nobody to miss", "Nothing, until it has more than one process.")
    hosts = [cluster.coordinator.rpartition(":")[0].strip("[]")]
    hosts += [name for name in node_names(environ.get("SLURM_STEP_NODELIST", "")) if name not in hosts]
    past = ",".join(environ.get(name, "") for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"))
    through = [host for host in hosts if not bypassed(host, past)]
    if not through:
        return PROXY.ok(f"{seen}, and not for {listed(hosts)}")
    return PROXY.fault(
        f"{seen}, also for {listed(through)}",
        f"export no_proxy={','.join(hosts)} (added to what is there), or unset the proxy for the run.",
    )


def bypassed(host: str, no_proxy: str) -> bool:
    """Whether no_proxy names a host: by itself, by a domain it ends with, by a range of addresses, or all with a star."""
    for entry in filter(None, (part.strip() for part in no_proxy.split(","))):
        if entry == "*" or host == entry.lstrip(".") or host.endswith("." + entry.lstrip("*.")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:  # names, not addresses
            continue
    return host in ("localhost", "127.0.0.1", "::1")


def visible(node: Node) -> Check:
    value = node.machine.environ().get(VISIBLE)
    if value is None:
        return DEVICES.ok("unset")
    given = [part.strip() for part in value.split(",") if part.strip()]
    if value.strip() in ("", "-1", "NoDevFiles"):
        return DEVICES.fault(f"{value!r} hides all GPUs", f"unset {VISIBLE}.")
    cluster, every = node.asked.cluster, [*node.gpus.rows, *node.gpus.others]
    have = len(every)
    gone = [g for g in given if not smi.visible(every, g)]
    if gone:
        return DEVICES.fault(f"{value}: there is no GPU {listed(gone)}", f"unset {VISIBLE}, or name GPUs 0 to {have - 1}.")
    ids = cluster.local_device_ids if cluster else None
    if ids and max(ids) >= len(given):
        own = f"this process's GPU is number {listed([str(i) for i in ids])} of those, of which there is {len(given)}"
        return DEVICES.fault(f"{value} in one of several processes of the node: {own}")
    if len(given) < have:
        return DEVICES.note(f"{value}: {len(given)} of {have} GPUs", f"Nothing, if they are meant; otherwise unset {VISIBLE}.")
    if node.gpus.indices == sorted(node.gpus.indices):
        return DEVICES.ok(value)
    return DEVICES.note(f"{value}: in another order than the node's", "Nothing, if it is meant.")


def of_processes(processes: list[tuple[str, str]]) -> list[Check]:
    """Of all processes of a run, as (host, CUDA_VISIBLE_DEVICES): those of one host must agree."""
    found = []
    for host in dict.fromkeys(host for host, _ in processes):
        values = sorted({value for h, value in processes if h == host})
        if len(values) > 1:
            found.append(DEVICES.fault(f"{len(values)} values on {host}: {listed([repr(v) for v in values])}"))
    return found


PARTS = ((STALE, overlay), (PROXY, proxy), (DEVICES, visible))
