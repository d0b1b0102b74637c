"""Detect the processes of a run from options, or from the variables of a launcher. Starts nothing and imports no JAX."""

import dataclasses
import itertools
import re
from collections.abc import Mapping

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import Problem
from jaxtrain.runtime.addresses import PORT, brackets_missing, host_port, is_ipv6, without_brackets

# Each option, and the variables that may give it instead, the first one that is set. JAX itself reads JAX_COORDINATOR_ADDRESS
# and JAX_LOCAL_DEVICE_IDS; programs that start JAX read the others.
OPTIONS = {
    "coordinator": ("JAXTRAIN_COORDINATOR", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP"),
    "num-processes": ("JAXTRAIN_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"),
    "process-id": ("JAXTRAIN_PROCESS_ID", "JAX_PROCESS_ID", "JAX_PROCESS_INDEX"),
    "local-devices": ("JAXTRAIN_LOCAL_DEVICES", "JAX_LOCAL_DEVICE_IDS"),
}
FIELDS = tuple(OPTIONS)
JAX_PORT = "JAX_COORDINATOR_PORT"
ADDRESS_REMEDY = "Give process 0's machine and a free port there, as node1:12321; the same in every process."


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The names of a launcher's variables. Of several names with spaces between them, the first that is set counts."""

    name: str
    count: str  # of all processes; "": no variable has it
    index: str  # of this process
    local_count: str = ""  # of the processes on this node; "": one, unless `nodes` says otherwise
    local_index: str = ""
    nodes: str = ""  # number of nodes
    host: str = "MASTER_ADDR"  # of process 0, or a list of all hosts
    port: str = "MASTER_PORT"  # "": PORT
    half: bool = True  # count or index without the other is a mistake, and not a variable with another meaning
    unless: str = ""  # all of these are set by another launcher below this one, whose variables count


# The first whose count and index are set describes the run. A launcher that may be started by another is above it.
SLURM = Launcher("Slurm", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_PROCID", half=False)
LAUNCHERS = (
    # torchrun's own options, which Kubeflow sets for one torchrun on each node. One process on each node is started instead.
    Launcher("PET_*", "PET_NNODES", "PET_NODE_RANK", host="PET_MASTER_ADDR", port="PET_MASTER_PORT", unless="LOCAL_RANK RANK"),
    Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher(
        "MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    Launcher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES"),
    SLURM,
    Launcher(
        "MPI",  # MPICH, Intel MPI, PALS
        "PMI_SIZE",
        "PMI_RANK PALS_RANKID",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
        "MPI_LOCALRANKID PMI_LOCAL_RANK",
    ),
    Launcher("PMIx", "", "PMIX_RANK"),
    Launcher("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", host="SKYPILOT_NODE_IPS", port=""),
    Launcher("Horovod", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_LOCAL_RANK"),
    Launcher("LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", host="LWS_LEADER_ADDRESS", port=""),
    Launcher("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
    Launcher("JAXJob", "NUM_PROCESSES", "PROCESS_ID", host="COORDINATOR_ADDRESS", port="COORDINATOR_PORT", half=False),
    Launcher("NNODES", "NNODES", "NODE_RANK"),  # of MaxText and others: one process on each node
    Launcher("Kubernetes", "", "JOB_COMPLETION_INDEX", half=False),  # the index may be that of one of several runs
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The address and the number of a run's processes, and the index of this process."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None  # None: all devices of the node (one process per node)
    source: str  # the options, variables or launcher that describe the cluster, for log and receipt


def all_devices(here: Devices, cluster: Cluster | None) -> Devices:
    """Return the devices of all processes of a run, from the devices of this process.

    All processes are assumed to have the same devices; `agree` checks it. `cluster` is None for a run of one process.
    """
    if cluster is None or not here.count:
        return here
    masked = here.kind == "gpu" and cluster.local_device_ids is not None  # CPU devices are not masked by their ids
    count = len(cluster.local_device_ids or ()) if masked else here.count
    return dataclasses.replace(here, count=count * cluster.num_processes, node=count)


def detect(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Cluster | None, list[Problem]]:
    """Return (cluster of this process, or None for a run of one process; all problems found).

    Each value comes from its option, else from a variable in OPTIONS. The remaining values come from the first launcher in
    LAUNCHERS whose variables are set; of Slurm, only under srun. A launcher that starts several processes on a node gives each
    the device of its local rank. Otherwise a process uses all devices of its node.

    Args:
      options: the command line's "coordinator", "num-processes", "process-id" and "local-devices", each "" if not given.
    """
    reader = _Reader(options, environ)
    cluster = reader.cluster()
    return (None, reader.problems) if reader.problems else (cluster, [])


@dataclasses.dataclass
class _Values:
    """Values from a launcher's variables. None: no variable has the value; for `devices`: all devices of the node."""

    name: str
    coordinator: str | None
    count: int | None
    index: int | None
    devices: tuple[int, ...] | None


class _Reader:
    """Reads the cluster's values from options and environment, and collects their problems."""

    def __init__(self, options: Mapping[str, str], environ: Mapping[str, str]):
        self.environ = environ
        self.problems: list[Problem] = []
        self.keys: dict[str, str] = {}  # field -> the option or variable that gives it
        self.given: dict[str, str] = {}
        for field, variables in OPTIONS.items():
            texts = {f"--{field}": options.get(field, "")} | {name: environ.get(name, "") for name in variables}
            for key, text in texts.items():
                if text.strip():
                    self.keys[field], self.given[field] = key, text.strip()
                    break

    def cluster(self) -> Cluster | None:
        coordinator = self.coordinator()
        count = self.number(self.keys.get("num-processes", ""), self.given.get("num-processes", ""), 1)
        index = self.number(self.keys.get("process-id", ""), self.given.get("process-id", ""), 0)
        devices = self.devices()
        whole = all(field in self.given for field in FIELDS[:3])
        # If all three are given, the variables of a surrounding allocation do not matter.
        launcher = None if whole or count == 1 else self.read_launcher()
        by_hand = [self.keys[field] for field in FIELDS[:3] if field in self.given]
        sources = by_hand[:1]
        if launcher is not None:
            sources = [launcher.name, *by_hand]
            coordinator = launcher.coordinator if "coordinator" not in self.given else coordinator
            count = launcher.count if "num-processes" not in self.given else count
            index = launcher.index if "process-id" not in self.given else index
            devices = launcher.devices if "local-devices" not in self.given else devices
        if self.problems:
            return None
        if count == 1 or not sources:
            if "local-devices" in self.given:
                rule = "is for runs of several processes, and this is a run of one"
                remedy = "Leave it out; CUDA_VISIBLE_DEVICES chooses the GPUs of a single process."
                self.wrong(self.keys["local-devices"], self.given["local-devices"], rule, remedy)
            return None
        if coordinator is None or count is None or index is None:
            for field, value in zip(FIELDS, (coordinator, count, index), strict=False):
                if value is None:
                    self.missing(field, launcher)
            return None
        if index >= count:
            rule = f"process {index} cannot be one of {count}: they are counted from 0"
            self.wrong(" and ".join(sources[:1] + by_hand[1:]), None, rule, f"Give each process its own of 0 to {count - 1}.")
            return None
        return Cluster(coordinator, count, index, devices, " and ".join(sources))

    def missing(self, field: str, launcher: _Values | None) -> None:
        variable = "JAXTRAIN_" + field.replace("-", "_").upper()
        known = " and ".join([*([launcher.name] if launcher else []), *(self.keys[f] for f in FIELDS[:3] if f in self.given)])
        what = {
            "coordinator": "the address of process 0",
            "num-processes": "the number of processes",
            "process-id": "the index of this process",
        }
        remedy = {
            "coordinator": f"Set {variable}, or --{field}, to HOST:PORT. {ADDRESS_REMEDY}",
            "num-processes": f"Set {variable}, or --{field}, to the same number in every process.",
            "process-id": f"Set {variable}, or --{field}, to 0, 1, 2 and so on.",
        }
        rule = f"is not known from {known}: {what[field]}"
        self.wrong(f"--{field}", None, rule, remedy[field])

    def read_launcher(self) -> _Values | None:
        """Return the values of the first launcher whose variables are set, of several processes if any is; None if none is.

        If no launcher has count and index, one of them alone counts where options give the rest. Else it is a problem.
        """
        here = [each for each in LAUNCHERS if not each.unless or not all(map(self.environ.get, each.unless.split()))]
        alone = None
        for each in here:
            found = (
                self.slurm() if each is SLURM else self.values(each) if self.has(each.count) and self.has(each.index) else None
            )
            if self.problems or (found is not None and found.count != 1):
                return found
            alone = alone or found
        if alone is not None:
            return alone
        halves = [each for each in here if each is not SLURM and (self.has(each.count) or self.has(each.index))]
        if set(FIELDS[:3]) & set(self.given):
            return self.values(halves[0]) if halves else None
        for each in halves:
            if each.half and self.text(each.count).strip() != "1":
                self.wrong_half(each)
                return None
        return None

    def wrong_half(self, launcher: Launcher) -> None:
        there, absent = self.first(launcher.index), self.first(launcher.count)
        if not self.has(there):
            there, absent = absent, there
        by_hand = "give --coordinator, --num-processes and --process-id (a run of one process: JAXTRAIN_NUM_PROCESSES=1)"
        if absent:
            self.wrong(there, self.environ[there], f"is set without {absent}", f"Set both, {by_hand}, or unset {there}.")
        else:
            rule = "numbers one of several processes, and no variable has their count"
            self.wrong(there, self.environ[there], rule, f"{by_hand[0].upper()}{by_hand[1:]}, or unset {there}.")

    def values(self, launcher: Launcher) -> _Values:
        """Return the values of a launcher of which count or index is set."""
        nodes = re.sub(r"^(\d+):\1$", r"\1", self.text(launcher.count))  # torchrun's MIN:MAX
        count = self.number(self.first(launcher.count), nodes, 1)
        if count == 1:
            return _Values(launcher.name, None, 1, 0, None)
        index = self.number(self.first(launcher.index), self.text(launcher.index), 0)
        return _Values(launcher.name, self.master(launcher), count, index, self.local(launcher, count))

    def first(self, names: str) -> str:
        """Return the first of the names that is set; the first name, "" for none, if none is."""
        return next((name for name in names.split() if self.environ.get(name)), names.partition(" ")[0])

    def text(self, names: str) -> str:
        return self.environ.get(self.first(names), "") if names else ""

    def has(self, names: str) -> bool:
        return bool(self.text(names))

    def slurm(self) -> _Values | None:
        env, count_name = self.environ, self.first(SLURM.count)
        if not all(env.get(k) for k in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", count_name)):
            return None  # not under srun: a batch script runs its commands once, for any number of tasks
        mpi = env.get("PMI_SIZE"), env.get("PMI_RANK")
        if all(mpi) and mpi != (env[count_name], env.get("SLURM_PROCID")):
            return None  # mpiexec uses srun to start itself on the nodes
        if env.get("SLURM_HET_SIZE", "1") != "1":
            rule = "this is a heterogeneous job, and no variable has the count of processes in all its components"
            remedy = (
                "Give --coordinator, --num-processes and --process-id, or unset SLURM_HET_SIZE for a step of one component."
            )
            self.wrong("SLURM_HET_SIZE", env["SLURM_HET_SIZE"], rule, remedy)
            return None
        count = self.number(count_name, env[count_name], 1)
        if count == 1:
            return _Values("Slurm", None, 1, 0, None)
        index = self.number("SLURM_PROCID", env.get("SLURM_PROCID", ""), 0, needed=True)
        counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or ""
        tasks = [int(n) for n in re.findall(r"(?:^|,)(\d+)", counts)]  # as 8(x2),4
        nodes = node_names(env["SLURM_STEP_NODELIST"])
        if not nodes and not ("coordinator" in self.given and (tasks or "local-devices" in self.given)):
            remedy = "Set JAXTRAIN_COORDINATOR, and JAXTRAIN_LOCAL_DEVICES where a node has several tasks."
            self.wrong("SLURM_STEP_NODELIST", env["SLURM_STEP_NODELIST"], "is no list of nodes that jaxtrain can read", remedy)
        job = self.number("SLURM_JOB_ID", env["SLURM_JOB_ID"], 0)
        # The port that jax would use. It differs between jobs on the same nodes.
        port = self.number(JAX_PORT, env.get(JAX_PORT, ""), 1, 65535) or (job or 0) % 2**12 + 65536 - 2**12
        coordinator = host_port(nodes[0], port) if nodes else None
        several = max(tasks) > 1 if tasks else (count or 0) > len(nodes)
        devices = None
        if several and "local-devices" not in self.given:
            local = self.number("SLURM_LOCALID", env.get("SLURM_LOCALID", ""), 0, needed=True)
            devices = (local or 0,)
        return _Values("Slurm", coordinator, count, index, devices)

    def master(self, launcher: Launcher) -> str | None:
        """Return the coordinator's address from the launcher's variables of host and port.

        Returns None if an option or a variable in OPTIONS gives the address, if the launcher does not have it, or if it has a
        problem.
        """
        env, name = self.environ, launcher.host
        if "coordinator" in self.given:
            return None
        if not env.get(name):
            if launcher.name == "torchrun":  # it always sets both
                remedy = f"Set MASTER_ADDR and MASTER_PORT, or JAXTRAIN_COORDINATOR. {ADDRESS_REMEDY}"
                self.wrong(name, None, "is not set; it is the address of process 0", remedy)
                self.number(launcher.port, env.get(launcher.port, ""), 1, 65535, needed=True)
            return None
        port = PORT
        if launcher.port and not env.get(launcher.port) and not is_ipv6(env[name]) and re.fullmatch(r".+:\d+", env[name]):
            return self.address(name, env[name])
        if launcher.port:
            port = self.number(launcher.port, env.get(launcher.port, ""), 1, 65535, needed=True)
        if port is None:
            return None
        if launcher.name == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1  # torchrun itself listens on MASTER_PORT, and passes this to its processes
        hosts = re.split(r"[\s,]+", env[name].strip())
        return self.address(name, host_port(hosts[0], port))

    def local(self, launcher: Launcher, count: int | None) -> tuple[int, ...] | None:
        """Return (local rank,) of this process, the index of its device, if there are several processes on its node.

        Returns None if this process is alone on its node, or if local-devices gives the devices.
        """
        names = launcher.local_count, launcher.local_index
        if "local-devices" in self.given or not (self.has(names[0]) or self.has(names[1])):
            return None
        size = self.first(names[0])
        if launcher.nodes:
            nodes = self.number(launcher.nodes, self.text(launcher.nodes), 1, needed=True)
            processes = -(-(count or 1) // (nodes or 1))
        else:
            processes = self.number(size, self.text(size), 1, needed=True)
        if processes == 1:
            return None
        rank = self.first(names[1])
        own = self.number(rank, self.text(rank), 0, (processes or 2**31) - 1, needed=True)
        return (own or 0,)

    def devices(self) -> tuple[int, ...] | None:
        text = self.given.get("local-devices")
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"[0-9]+", part) for part in parts) or len({int(p) for p in parts}) < len(parts):
            rule = "must be different whole numbers with commas between them"
            self.wrong(self.keys["local-devices"], text, rule, "Write 0,1 for the first two devices of the machine.")
            return None
        return tuple(int(part) for part in parts)

    def coordinator(self) -> str | None:
        """Return the address of process 0 that an option or a variable gives. JAX's variables may have the port apart."""
        key, text = self.keys.get("coordinator", ""), self.given.get("coordinator", "")
        if key.startswith("JAX_") and (":" not in text or is_ipv6(without_brackets(text))):
            port = self.environ.get(JAX_PORT, "").strip()
            if not port:
                remedy = f"Set {JAX_PORT}={PORT} in every process, or --coordinator=HOST:PORT."
                self.wrong(key, text, f"has no port, and {JAX_PORT} is not set", remedy)
                return None
            text = host_port(text, port)
        return self.address(key, text)

    def address(self, key: str, text: str) -> str | None:
        if not text:
            return None
        host, _, port = text.rpartition(":")
        fits = is_ipv6(host[1:-1]) and host == f"[{host[1:-1]}]" or re.fullmatch(r"[\w.-]+", host, re.ASCII)
        if not fits or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            if bracketed := brackets_missing(text):
                self.wrong(key, text, "an IPv6 address needs brackets before its port", f"Write {bracketed}.")
            else:
                self.wrong(key, text, "must be HOST:PORT, the port from 1 to 65535", ADDRESS_REMEDY)
            return None
        return text

    def number(self, key: str, text: str, low: int, high: int = 2**31 - 1, *, needed: bool = False) -> int | None:
        text = text.strip()
        if not text:
            if needed:
                remedy = f"Set it, or JAXTRAIN_{', JAXTRAIN_'.join(f.replace('-', '_').upper() for f in FIELDS)}."
                self.wrong(key, None, "is not set, though variables beside it are", remedy)
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            rule = f"must be a whole number from {low}" + (f" to {high}" if high < 2**31 - 1 else "")
            self.wrong(key, text, rule, f"Write {PORT if high == 65535 else low + 1}, for example.")
            return None
        return int(text)

    def wrong(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, value, rule, remedy))


def node_names(text: str) -> list[str]:
    """Return the nodes of a Slurm node list: gpu[01-03,07],login1 -> gpu01, gpu02, gpu03, gpu07, login1; [] for other text."""
    names = []
    # Commas inside brackets separate ranges.
    for entry in re.split(r",(?![^\[\]]*\])", text.strip()):
        if is_ipv6(entry):
            names.append(entry)
            continue
        if not re.fullmatch(r"([\w.-]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", entry, re.ASCII):
            return []
        parts = [_numbers(part[1:-1]) if part[0] == "[" else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", entry)]
        names += ["".join(pieces) for pieces in itertools.product(*parts)]
    return names


def _numbers(text: str) -> list[str]:
    """Return the numbers of a list of ranges, with their leading zeros: 01-03,07 -> 01, 02, 03, 07."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers
