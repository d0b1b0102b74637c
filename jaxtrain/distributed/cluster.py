"""Detect the processes of a run from options, or from the variables of a launcher. Starts nothing and imports no JAX."""

import dataclasses
import itertools
import re
from collections.abc import Mapping

from jaxtrain.config import Problem
from jaxtrain.hardware import Devices

FIELDS = ("coordinator", "num-processes", "process-id", "local-devices")
ADDRESS_REMEDY = "Give process 0's machine and a free port there, as node1:12321; the same in every process."


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

    All processes are assumed to have the same devices. `cluster` is None for a run of one process.
    """
    if cluster is None or not here.count:
        return here
    masked = here.kind == "gpu" and cluster.local_device_ids is not None  # CPU devices are not masked by their ids
    count = len(cluster.local_device_ids or ()) if masked else here.count
    return dataclasses.replace(here, count=count * cluster.num_processes, node=count)


def detect(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Cluster | None, list[Problem]]:
    """Return (cluster of this process, or None for a run of one process; all problems found).

    Each value comes from its option, else from JAXTRAIN_COORDINATOR, JAXTRAIN_NUM_PROCESSES, JAXTRAIN_PROCESS_ID or
    JAXTRAIN_LOCAL_DEVICES. The remaining values come from the first of these launchers whose variables are set: torchrun,
    Slurm (under srun), Open MPI, a Kubernetes Job (the index only). If torchrun, Slurm or Open MPI starts several processes on
    a node, each uses the device of its local rank. Otherwise a process uses all devices of its node.

    Args:
      options: the command line's "coordinator", "num-processes", "process-id" and "local-devices", each "" if not given.
    """
    reader = _Reader(options, environ)
    cluster = reader.cluster()
    return (None, reader.problems) if reader.problems else (cluster, [])


@dataclasses.dataclass
class _Launcher:
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
        for field in FIELDS:
            variable = "JAXTRAIN_" + field.replace("-", "_").upper()
            for key, text in ((f"--{field}", options.get(field, "")), (variable, environ.get(variable, ""))):
                if text.strip():
                    self.keys[field], self.given[field] = key, text.strip()
                    break

    def cluster(self) -> Cluster | None:
        coordinator = self.address(self.keys.get("coordinator", ""), self.given.get("coordinator", ""))
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

    def missing(self, field: str, launcher: _Launcher | None) -> None:
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

    def read_launcher(self) -> _Launcher | None:
        """Return the values of the first launcher whose variables are set; None if no launcher's are."""
        for read in (self.torchrun, self.slurm, self.open_mpi, self.kubernetes):
            found = read()
            if found is not None or self.problems:
                return found
        # Half of torchrun's pair, and no other launcher: several processes were intended.
        rank, world = self.environ.get("RANK", ""), self.environ.get("WORLD_SIZE", "")
        if bool(rank) != bool(world) and world.strip() != "1" and not set(FIELDS[:3]) & set(self.given):
            there, absent = ("RANK", "WORLD_SIZE") if rank else ("WORLD_SIZE", "RANK")
            rule = f"is set without {absent}"
            self.wrong(there, self.environ[there], rule, f"Set both, as torchrun does, or unset {there}.")
        return None

    def torchrun(self) -> _Launcher | None:
        env = self.environ
        if not (env.get("RANK") and env.get("WORLD_SIZE")):
            return None
        count = self.number("WORLD_SIZE", env["WORLD_SIZE"], 1)
        index = self.number("RANK", env["RANK"], 0)
        if count == 1:
            return _Launcher("torchrun", None, 1, 0, None)
        return _Launcher("torchrun", self.master(), count, index, self.local("LOCAL_WORLD_SIZE", "LOCAL_RANK"))

    def slurm(self) -> _Launcher | None:
        env = self.environ
        if not all(env.get(k) for k in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS")):
            return None  # not under srun: a batch script runs its commands once, for any number of tasks
        count = self.number("SLURM_NTASKS", env["SLURM_NTASKS"], 1)
        if count == 1:
            return _Launcher("Slurm", None, 1, 0, None)
        index = self.number("SLURM_PROCID", env.get("SLURM_PROCID", ""), 0, needed=True)
        counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or ""
        tasks = [int(n) for n in re.findall(r"(?:^|,)(\d+)", counts)]  # as 8(x2),4
        nodes = node_names(env["SLURM_STEP_NODELIST"])
        if not nodes and not ("coordinator" in self.given and (tasks or "local-devices" in self.given)):
            remedy = "Set JAXTRAIN_COORDINATOR, and JAXTRAIN_LOCAL_DEVICES where a node has several tasks."
            self.wrong("SLURM_STEP_NODELIST", env["SLURM_STEP_NODELIST"], "is no list of nodes that jaxtrain can read", remedy)
        job = self.number("SLURM_JOB_ID", env["SLURM_JOB_ID"], 0)
        # The port that jax would use. It differs between jobs on the same nodes.
        coordinator = f"{nodes[0]}:{(job or 0) % 2**12 + 65536 - 2**12}" if nodes else None
        several = max(tasks) > 1 if tasks else (count or 0) > len(nodes)
        devices = None
        if several and "local-devices" not in self.given:
            local = self.number("SLURM_LOCALID", env.get("SLURM_LOCALID", ""), 0, needed=True)
            devices = (local or 0,)
        return _Launcher("Slurm", coordinator, count, index, devices)

    def open_mpi(self) -> _Launcher | None:
        env, prefix = self.environ, "OMPI_COMM_WORLD_"
        if not (env.get(prefix + "SIZE") or env.get(prefix + "RANK")):
            return None
        count = self.number(prefix + "SIZE", env.get(prefix + "SIZE", ""), 1, needed=True)
        if count == 1:
            return _Launcher("Open MPI", None, 1, 0, None)
        index = self.number(prefix + "RANK", env.get(prefix + "RANK", ""), 0, needed=True)
        coordinator = self.master() if env.get("MASTER_ADDR") else None
        return _Launcher("Open MPI", coordinator, count, index, self.local(prefix + "LOCAL_SIZE", prefix + "LOCAL_RANK"))

    def kubernetes(self) -> _Launcher | None:
        env = self.environ
        if not (env.get("KUBERNETES_SERVICE_HOST") and env.get("JOB_COMPLETION_INDEX")):
            return None
        if not set(FIELDS[:3]) & set(self.given):
            return None  # an indexed Job of independent runs
        return _Launcher("Kubernetes", None, None, self.number("JOB_COMPLETION_INDEX", env["JOB_COMPLETION_INDEX"], 0), None)

    def master(self) -> str | None:
        """Return the coordinator's address from MASTER_ADDR and MASTER_PORT.

        Returns None if an option or JAXTRAIN_COORDINATOR gives the address, or if MASTER_ADDR or MASTER_PORT has a problem.
        """
        env = self.environ
        if "coordinator" in self.given:
            return None
        if not env.get("MASTER_ADDR"):
            remedy = f"Set MASTER_ADDR and MASTER_PORT, or JAXTRAIN_COORDINATOR. {ADDRESS_REMEDY}"
            self.wrong("MASTER_ADDR", None, "is not set; it is the address of process 0", remedy)
        port = self.number("MASTER_PORT", env.get("MASTER_PORT", ""), 1, 65535, needed=True)
        if not env.get("MASTER_ADDR") or port is None:
            return None
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1  # torchrun itself listens on MASTER_PORT, and passes this to its processes
        return self.address("MASTER_ADDR", f"{env['MASTER_ADDR'].strip()}:{port}")

    def local(self, size: str, rank: str) -> tuple[int, ...] | None:
        """Return (local rank,) of this process, the index of its device, if there are several processes on its node.

        Returns None if this process is alone on its node, or if local-devices gives the devices. size, rank: names of the
        launcher's variables for the number of processes on the node and the local rank.
        """
        if "local-devices" in self.given or not (self.environ.get(size) or self.environ.get(rank)):
            return None
        processes = self.number(size, self.environ.get(size, ""), 1, needed=True)
        if processes == 1:
            return None
        own = self.number(rank, self.environ.get(rank, ""), 0, (processes or 2**31) - 1, needed=True)
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

    def address(self, key: str, text: str) -> str | None:
        if not text:
            return None
        host, _, port = text.rpartition(":")
        fits = re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+", host, re.ASCII)
        if not fits or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
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
            self.wrong(key, text, rule, f"Write {low}, for example.")
            return None
        return int(text)

    def wrong(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, value, rule, remedy))


def node_names(text: str) -> list[str]:
    """Return the nodes of a Slurm node list: gpu[01-03,07],login1 -> gpu01, gpu02, gpu03, gpu07, login1; [] for other text."""
    names = []
    # Commas inside brackets separate ranges.
    for entry in re.split(r",(?![^\[\]]*\])", text.strip()):
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
