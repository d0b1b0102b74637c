"""Detect the processes of a run from options, or from the variables of a launcher. Starts nothing and imports no JAX.

JAX can detect Slurm and Open MPI, but it must not be imported before the environment of the run is set, and it reads some of
their variables in other ways (tests/unit/test_distributed.py compares both).
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import Problem

# Each option, and the variables that may give it instead, the first one that is set.
OPTIONS = {
    "coordinator": ("JAXTRAIN_COORDINATOR", "JAX_COORDINATOR_ADDRESS"),
    "num-processes": ("JAXTRAIN_NUM_PROCESSES", "JAX_NUM_PROCESSES"),
    "process-id": ("JAXTRAIN_PROCESS_ID", "JAX_PROCESS_ID"),
    "local-devices": ("JAXTRAIN_LOCAL_DEVICES", "JAX_LOCAL_DEVICE_IDS"),
}
FIELDS = tuple(OPTIONS)
ADDRESS_REMEDY = "Give process 0's machine and a free port there, as node1:12321 or [fd00::1]:12321; the same in every process."
MEANINGS = {
    "coordinator": f"HOST:PORT. {ADDRESS_REMEDY}",
    "num-processes": "the same number in every process.",
    "process-id": "0, 1, 2 and so on.",
}
# The count of processes and the index of one, as launchers set them. If they tell of several processes and no launcher that is
# read here describes the run, each process would train alone. "": no variable has the count.
OTHER_LAUNCHERS = (
    *(("WORLD_SIZE", "RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")),
    *(("PMI_SIZE", "PALS_RANKID"), ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"), ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK")),
    *(("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"), ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")),
    *(("HOROVOD_SIZE", "HOROVOD_RANK"), ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"), ("PET_NNODES", "PET_NODE_RANK")),
    *(("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"), ("NNODES", "NODE_RANK")),
    *(("JAX_PROCESS_COUNT", "JAX_PROCESS_INDEX"), ("", "PMIX_RANK")),
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The address and the number of a run's processes, and the index of this process."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None  # None: all devices of the node (one process per node)
    source: str  # the options, variables or launcher that describe the cluster, for log and receipt


def all_devices(local_devices: Devices, cluster: Cluster | None) -> Devices:
    """Return the devices of all processes of a run, from the devices of this process.

    All processes are assumed to have the same devices; `agree` checks it. `cluster` is None for a run of one process.
    """
    if cluster is None or not local_devices.count:
        return local_devices
    masked = local_devices.kind == "gpu" and cluster.local_device_ids is not None  # CPU devices are not masked by their ids
    count = len(cluster.local_device_ids or ()) if masked else local_devices.count
    return dataclasses.replace(local_devices, count=count * cluster.num_processes, node=count)


def detect(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Cluster | None, list[Problem]]:
    """Return (cluster of this process, or None for a run of one process; all problems found).

    Each value comes from its option, else from a variable in OPTIONS. The others come from torchrun, Open MPI or (under srun)
    Slurm, from the first that describes several processes. If a node has several processes, each uses the device of its local
    rank. Otherwise a process uses all devices of its node.

    Args:
      options: the command line's "coordinator", "num-processes", "process-id" and "local-devices", each "" if not given.
    """
    reader = _Reader(options, environ)
    cluster = reader.cluster()
    return (None, reader.problems) if reader.problems else (cluster, [])


class _Reader:
    """Reads the cluster's values from options and environment, and collects their problems."""

    def __init__(self, options: Mapping[str, str], environ: Mapping[str, str]):
        self.environ = environ
        self.problems: list[Problem] = []
        self.values: dict[str, tuple[str, str]] = {}  # field -> the option or variable that gives it, and its text
        for field, variables in OPTIONS.items():
            texts = [(f"--{field}", options.get(field, "").strip()), *((name, self.text(name)) for name in variables)]
            if entry := next((pair for pair in texts if pair[1]), None):
                self.values[field] = entry

    def cluster(self) -> Cluster | None:
        values = self.values
        coordinator = self.address(*values["coordinator"]) if "coordinator" in values else None
        count = self.number(*values["num-processes"], 1) if "num-processes" in values else None
        index = self.number(*values["process-id"], 0) if "process-id" in values else None
        devices = self.devices(*values["local-devices"]) if "local-devices" in values else None
        by_hand = [values[field][0] for field in FIELDS[:3] if field in values]
        # If all three are given, the variables of a surrounding allocation do not matter.
        launcher = None if len(by_hand) == 3 or count == 1 else self.launcher()
        if launcher is not None:
            coordinator = coordinator or launcher.coordinator or None
            count = launcher.num_processes if count is None else count
            index = launcher.process_id if index is None else index
            devices = devices or launcher.local_device_ids
        sources = [launcher.source, *by_hand] if launcher else by_hand
        if self.problems:
            return None
        if count == 1 or not sources:
            if "local-devices" in values:
                rule = "is for runs of several processes, and this is a run of one"
                remedy = "Leave it out; CUDA_VISIBLE_DEVICES chooses the GPUs of a single process."
                self.refuse(*values["local-devices"], rule, remedy)
            return None
        if coordinator is None or count is None or index is None:
            for field, value in zip(FIELDS, (coordinator, count, index), strict=False):
                if value is None:
                    rule = f"is not known from {' and '.join(sources)}"
                    self.refuse(f"--{field}", None, rule, f"Set {OPTIONS[field][0]}, or --{field}, to {MEANINGS[field]}")
            return None
        if index >= count:
            rule = f"process {index} cannot be one of {count}: they are counted from 0"
            self.refuse(" and ".join(sources), None, rule, f"Give each process its own of 0 to {count - 1}.")
            return None
        return Cluster(coordinator, count, index, devices, " and ".join(sources if launcher else sources[:1]))

    def launcher(self) -> Cluster | None:
        """Return the values of the first launcher that describes several processes, None if none does; unknown address: ""."""
        alone = False
        # Slurm may have started one of the others, whose variables then count.
        for reader in (self.torchrun, self.open_mpi, self.slurm):
            cluster = reader()
            if self.problems or (cluster and cluster.num_processes > 1):
                return cluster
            alone = alone or cluster is not None
        # torchrun's MIN:MAX counts as MAX.
        texts = {count: re.fullmatch(r"(?:\d+:)?(\d+)", self.text(count)) for count, _ in OTHER_LAUNCHERS if count}
        sizes = {count: int(text[1]) for count, text in texts.items() if text}
        counts = [count for count, size in sizes.items() if size > 1]
        if self.text("PROCESS_ID") and self.text("NUM_PROCESSES") not in ("", "1"):
            counts.append("NUM_PROCESSES")
        alone = alone or 1 in sizes.values()
        for name in (counts or [index for _, index in OTHER_LAUNCHERS if self.text(index) and not alone])[:1]:
            rule = "belongs to a run of several processes, and does not tell jaxtrain their address, count and index"
            address, count, index, devices = (variables[0] for variables in OPTIONS.values())
            remedy = f"Set {address}, {count} and {index} in every process (and {devices} where a node has several), or"
            self.refuse(name, self.text(name), rule, f"{remedy} {count}=1 to train alone.")
        return None

    def torchrun(self) -> Cluster | None:
        if not (self.text("WORLD_SIZE") and self.text("RANK")):
            return None
        if self.text("PET_NNODES") and not self.text("LOCAL_RANK"):
            return None  # Kubeflow sets all of them for one torchrun on each node, which is not there
        cluster = self.process("torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        if cluster.num_processes == 1 or "coordinator" in self.values:
            return cluster
        host, port = self.require("MASTER_ADDR"), self.number("MASTER_PORT", self.require("MASTER_PORT"), 1, 65535)
        if self.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1  # torchrun itself listens on MASTER_PORT, and passes this to its processes
        host = f"[{host}]" if ":" in host and host[0] != "[" else host  # IPv6
        return dataclasses.replace(cluster, coordinator=self.address("MASTER_ADDR", f"{host}:{port}") if host else "")

    def open_mpi(self) -> Cluster | None:
        """Return the values of mpirun, whose variables have no address of process 0."""
        size, rank, local_size, local_rank = (f"OMPI_COMM_WORLD_{end}" for end in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
        return self.process("Open MPI", size, rank, local_size, local_rank) if self.text(size) else None

    def slurm(self) -> Cluster | None:
        count, nodes = "SLURM_STEP_NUM_TASKS" if self.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", "SLURM_STEP_NODELIST"
        if not all(map(self.text, ("SLURM_JOB_ID", nodes, count))):
            return None  # not under srun: a batch script runs its commands once, for any number of tasks
        if self.text("PMI_SIZE") not in ("", self.text(count)):
            return None  # mpiexec uses srun to start itself on the nodes
        if self.text("SLURM_HET_SIZE") not in ("", "1"):
            rule = "this is a heterogeneous job, and no variable has the count of processes in all its components"
            remedy = "Set JAXTRAIN_COORDINATOR, JAXTRAIN_NUM_PROCESSES and JAXTRAIN_PROCESS_ID in every process, or"
            self.refuse("SLURM_HET_SIZE", self.text("SLURM_HET_SIZE"), rule, f"{remedy} unset it for a step of one component.")
            return None
        cluster = self.process("Slurm", count, "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID")
        if cluster.num_processes == 1 or "coordinator" in self.values:
            return cluster
        # The port that jax would use. It differs between jobs on the same nodes.
        port = self.number("SLURM_JOB_ID", self.text("SLURM_JOB_ID"), 0) % 2**12 + 2**16 - 2**12
        if port_text := self.text("JAX_COORDINATOR_PORT"):
            port = self.number("JAX_COORDINATOR_PORT", port_text, 1, 65535)
        names = node_names(self.text(nodes))
        if not names:
            self.refuse(nodes, self.text(nodes), "is no list of nodes that jaxtrain can read", "Set JAXTRAIN_COORDINATOR.")
            return None
        return dataclasses.replace(cluster, coordinator=f"{names[0]}:{port}")

    def process(self, launcher: str, count: str, index: str, local_count: str, local_index: str) -> Cluster:
        """Return the values of these variables, without an address. local_count: a number, or Slurm's list: 8(x2),4."""
        processes = self.number(count, self.text(count), 1)
        if processes == 1:
            return Cluster("", 1, 0, None, launcher)
        process_id, devices = self.number(index, self.require(index), 0), None
        if "local-devices" not in self.values and (self.text(local_count) or self.text(local_index)):
            counts = re.sub(r"\(x\d+\)", "", self.require(local_count)).split(",")
            # A process that is alone on its node has all its devices.
            if (most := max(self.number(local_count, text, 1) for text in counts)) > 1:
                devices = (self.number(local_index, self.require(local_index), 0, most - 1),)
        return Cluster("", processes, process_id, devices, launcher)

    def devices(self, key: str, text: str) -> tuple[int, ...] | None:
        id_texts = [id_text.strip() for id_text in text.split(",")]
        if not all(re.fullmatch(r"[0-9]+", id_text) for id_text in id_texts) or len({int(p) for p in id_texts}) < len(id_texts):
            rule = "must be different whole numbers with commas between them"
            self.refuse(key, text, rule, "Write 0,1 for the first two devices of the machine.")
            return None
        return tuple(int(id_text) for id_text in id_texts)

    def address(self, key: str, text: str) -> str:
        match = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+(?:%\w+)?\]):([0-9]{1,5})", text, re.ASCII)
        if not match or not 1 <= int(match[2]) <= 65535:
            self.refuse(key, text, "must be HOST:PORT, the port from 1 to 65535, an IPv6 address in brackets", ADDRESS_REMEDY)
        return text

    def number(self, key: str, text: str, low: int, high: int = 2**31 - 1) -> int:
        """Return a whole number; `low` if there is a problem, or no text."""
        if text and not (re.fullmatch(r"[0-9]{1,10}", text) and low <= int(text) <= high):
            rule = f"must be a whole number from {low}" + (f" to {high}" if high < 2**31 - 1 else "")
            self.refuse(key, text, rule, f"Write {12321 if high == 65535 else low + 1}, for example.")
            return low
        return int(text or low)

    def require(self, name: str) -> str:
        """Return the text of a launcher's variable, which must be set."""
        if not self.text(name):
            remedy = f"Set it, or {', '.join(variables[0] for variables in OPTIONS.values())}."
            self.refuse(name, None, "is not set, though variables beside it are", remedy)
        return self.text(name)

    def text(self, name: str) -> str:
        return self.environ.get(name, "").strip()

    def refuse(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, value, rule, remedy))


def node_names(text: str) -> list[str]:
    """Return the nodes of a Slurm node list: gpu[01-03,07],login1 -> gpu01, gpu02, gpu03, gpu07, login1; [] for other text."""
    names = []
    # Commas inside brackets separate ranges.
    for entry in re.split(r",(?![^\[\]]*\])", text.strip()):
        if not re.fullmatch(r"([\w.-]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", entry, re.ASCII):
            return []
        sections = re.split(r"\[(.*?)\]", entry)  # text and ranges in turn
        choices = [_numbers(section) if i % 2 else [section] for i, section in enumerate(sections)]
        names += ["".join(pieces) for pieces in itertools.product(*choices)]
    return names


def _numbers(text: str) -> list[str]:
    """Return the numbers of a list of ranges, with their leading zeros: 01-03,07 -> 01, 02, 03, 07."""
    numbers = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers
