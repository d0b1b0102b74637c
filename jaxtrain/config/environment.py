"""The environment variables of a run: a table for each GPU, the config's additions, and refused variables of the shell.

The same config must give the same run to every user. So variables that change the results or the speed of GPUs are part
of the config: `env.defaults` sets the GPU's table below, `env.set` adds to it, and `env.inherit` names variables of the shell
that may stay. Any other such variable of the shell is reported as a problem. Imports no jax: the variables must be set before
jax is imported.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping

from jaxtrain.config.hardware import HOST_LIMIT, NCCL_ALGO, Devices, memory_environment, memory_fraction, pinned_limit_gib
from jaxtrain.config.schema import Problem, RunConfig, parts_of

# Variable -> (value, reason); value None: it stays unset.
Table = Mapping[str, tuple[str | None, str]]

ALL: Table = {
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "a GPU has one number in CUDA, NVML, nvidia-smi and the receipt"),
    "NCCL_DEBUG": ("WARN", "an error of NCCL's comes with its reason; nothing is printed otherwise"),
    "NCCL_NVLS_ENABLE": (None, "NCCL sums in the switches where there are any; train.deterministic forbids it"),
    "NCCL_PROTO": (None, "NCCL chooses by size; one protocol for all sizes costs the others"),
}
# By compute capability (hardware.Gpu.sm): the differences between generations.
TABLES: Mapping[int, Table] = {
    80: ALL
    | {
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            None,
            "NVIDIA's JAX images set 1 on Hopper alone",
        ),
    },
    90: ALL
    | {
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            None,
            "NVIDIA's JAX images set 1 on Hopper; whether it pays is not measured: the command bench --suite=node compares",
        ),
        "NCCL_MNNVL_ENABLE": (None, "NVLink ends at the node (HGX): with 1 NCCL looks for links between nodes and fails"),
    },
    100: ALL
    | {
        "CUDA_DEVICE_MAX_CONNECTIONS": (None, "NVIDIA's JAX guide advises against 1 from Blackwell on"),
    },
}

# Names that change results or speed.
PREFIXES = ("NCCL_", "XLA_", "JAX_", "CUDA_", "CUDNN_", "CUBLAS_", "CUBLASLT_", "NVTE_", "TF_", "NVIDIA_TF32_OVERRIDE")
PREFIXES += ("MOCK_NUM_GPU_PROCESSES", "MOCK_GPU_TOPOLOGY")  # JAX's: collectives that do nothing
# Exceptions: names without an effect, and names that another module handles.
HARMLESS = (
    *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_TIMESTAMP*", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE"),
    *("JAX_LOGGING_LEVEL", "JAX_DEBUG_LOG_MODULES", "JAX_TRACEBACK_FILTERING", "CUDA_CACHE_*"),
    *("TF_CLI_*", "TF_VAR_*", "TF_DATA_DIR", "TF_LOG*", "TF_PLUGIN_*", "TF_TOKEN_*"),  # Terraform's
    # Variables of NVIDIA's images about themselves, and paths of a toolkit.
    *("*_VERSION", "CUDA_HOME", "CUDA_PATH*", "CUDA_ROOT", "CUDA_DIR", "CUDA_INSTALL_PATH", "CUDA_TOOLKIT_ROOT_DIR"),
    *("CUDA_BIN_PATH", "CUDNN_HOME", "CUDNN_PATH", "CUDNN_ROOT*", "CUDNN_*DIR", "NCCL_HOME", "NCCL_ROOT*", "NCCL_*_DIR"),
    # Selection of devices and processes: hardware.probe and distributed.detect read them (OPTIONS in runtime/cluster.py),
    # except JAX_COORDINATOR_BIND_ADDRESS, which JAX reads in process 0.
    *("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "CUDA_VISIBLE_DEVICES", "JAX_COORDINATOR_*", "JAX_LOCAL_DEVICE_IDS"),
    *("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT", "JAX_PROCESS_ID", "JAX_PROCESS_INDEX", "JAX_CUDA_VISIBLE_DEVICES"),
    # The memory budget: hardware.memory_environment refuses contradictions.
    *("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    *("XLA_PYTHON_CLIENT_ALLOCATOR", "TF_FORCE_UNIFIED_MEMORY", HOST_LIMIT),
)
# A site's network: not part of a run, and different from host to host.
SITE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE")
# Parts of the name of a variable whose value must not be in a log or receipt.
SECRET = ("TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH", "API_KEY", "ACCESS_KEY", "PRIVATE")
# Variables that the dynamic loader, the shell or Python reads before the config is read. Setting them here would be too late.
TOO_LATE = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"),
    *("JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_*", "JAX_LOCAL_DEVICE_IDS", "JAX_NUM_PROCESSES", "JAX_PROCESS_*", "JAXTRAIN_*"),
    *("JAX_CUDA_VISIBLE_DEVICES", "SLURM_*"),
)
EXPORTED = "JAXTRAIN_EXPORTED"  # names that an earlier run of this process has set


@dataclasses.dataclass(frozen=True)
class Overlay:
    """The environment variables that a run sets, with the reasons, and the variables that it inherits from the shell."""

    set: dict[str, str] = dataclasses.field(default_factory=dict)
    why: dict[str, str] = dataclasses.field(default_factory=dict)  # of the variables that are set
    inherited: dict[str, str] = dataclasses.field(default_factory=dict)
    unset: dict[str, str] = dataclasses.field(default_factory=dict)  # variables left unset on purpose, with the reason

    def common(self) -> dict[str, str]:
        """Return the variables that must be equal on all processes: all but HOST_LIMIT and the names in SITE."""
        apart = (HOST_LIMIT, *SITE)
        return {name: value for name, value in {**self.inherited, **self.set}.items() if name not in apart}

    def lines(self) -> list[str]:
        """Return lines for the log: the variables that are set, with reasons, and the inherited variables of the shell."""
        said = [f"environment: {name}={value} ({self.why[name]})" for name, value in self.set.items()]
        if self.inherited:
            shell = " ".join(f"{name}={value}" for name, value in self.inherited.items())
            said.append(f"environment: from the shell, unchanged: {shell}")
        return said


def table(sm: int) -> Table:
    """Return a GPU's table of variables; if it has none, that of the next older GPU. sm: its compute capability times ten."""
    return TABLES.get(max((known for known in TABLES if known <= sm), default=0), ALL)


def is_secret(name: str) -> bool:
    """Return whether the name of a variable suggests a secret."""
    return any(word in name.upper() for word in SECRET)


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the shell's variables that change the results or the speed of a run, without secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and not is_secret(name) and not any(fnmatch.fnmatchcase(name, each) for each in HARMLESS)
    }


def parse(text: str) -> tuple[dict[str, str], list[Problem]]:
    """Return `env.set` as name -> value, and its problems."""
    found: dict[str, str] = {}
    problems = []
    for item in parts_of(text):
        name, given, value = (part.strip() for part in item.partition("="))
        if not given or not name.replace("_", "a").isalnum() or name[:1].isdigit():
            problems.append(Problem("env.set", item, "must be NAME=VALUE", "For example NCCL_CROSS_NIC=1."))
        elif name in found:
            problems.append(Problem("env.set", item, f"{name} is named twice", "Keep one of them."))
        elif is_secret(name):
            rule = "its name suggests a secret, and the log and the receipt contain the values set here"
            problems.append(Problem("env.set", name, rule, "Set it in the shell that starts the run."))
        elif any(fnmatch.fnmatchcase(name, each) for each in TOO_LATE):
            rule = f"{name} is read before the config is"
            problems.append(
                Problem("env.set", item, rule, f"Set it in the shell that starts the run, and leave {name} out here.")
            )
        else:
            found[name] = value.replace("+", ",")
    return found, problems


def overlay(run: RunConfig, devices: Devices, environ: Mapping[str, str]) -> tuple[Overlay, list[Problem]]:
    """Return the variables that a run sets, and the problems of the environment in which it would start.

    On CPUs only `env.set` applies, and no variable of the shell is refused.
    """
    env = run.env
    asked, problems = parse(env.set)
    problems += [
        Problem(
            "env.inherit", each, "is no name or pattern of a variable", "Write names, as NCCL_ALGO,FI_*; values go to env.set."
        )
        for each in parts_of(env.inherit)
        if not re.fullmatch(r"[A-Za-z_*?][\w*?]*", each)
    ]
    chosen = {name: (value, "env.set") for name, value in asked.items()}
    if devices.kind != "gpu" or devices.count < 1:
        return _overlay(chosen, environ), problems
    known = table(devices.sm) if env.defaults else {}
    # An inherited variable overrides the table: the config names it.
    stays = {name for name in environ if _matches(name, env.inherit)}
    stays |= {name for name in ("NCCL_DEBUG",) if environ.get(name)}  # a user may ask NCCL for more messages
    unset = {name: why for name, (v, why) in known.items() if v is None and not environ.get(name)}
    chosen = {name: (v, why) for name, (v, why) in known.items() if v is not None and name not in stays} | chosen
    decided, wrong = _derive_variables(run, devices, asked, environ)
    chosen |= decided
    problems += wrong
    problems += _find_unnamed_variables(environ, env.inherit, {*chosen, *(p.key for p in problems)})
    overlay = _overlay(chosen, environ)
    return dataclasses.replace(overlay, unset={n: why for n, why in unset.items() if n not in overlay.set}), problems


def _derive_variables(
    run: RunConfig, devices: Devices, asked: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], list[Problem]]:
    """Return the variables that other keys decide (memory, deterministic sums), and problems of contradicting variables."""
    fraction = memory_fraction(devices.memory_gib, run.train.memory_fraction)
    memory, problems = memory_environment(fraction, {**environ, **asked})
    decided = {name: (value, "train.memory_fraction") for name, value in memory.items()}
    for name in sorted({*memory, HOST_LIMIT} & set(asked) - {p.key for p in problems}):
        rule = "follows from train.memory_fraction" if name != HOST_LIMIT else f"is read from the shell: {HOST_LIMIT}=GIB"
        problems.append(Problem("env.set", name, rule, "Leave it out here."))
    if not environ.get(HOST_LIMIT):
        decided[HOST_LIMIT] = (str(int(pinned_limit_gib(environ))), "memory of the host that copies of the state may pin, GiB")
    if run.train.deterministic:
        for source, value in (("env.set", asked.get("NCCL_ALGO")), ("NCCL_ALGO", environ.get("NCCL_ALGO"))):
            if value and value != NCCL_ALGO:
                rule = f"train.deterministic sets {NCCL_ALGO}: sums in switches (NVLS) have no fixed order"
                problems.append(Problem(source, value, rule, "Unset it, or set train.deterministic=false."))
        decided["NCCL_ALGO"] = (NCCL_ALGO, "train.deterministic")
    return decided, problems


def _find_unnamed_variables(environ: Mapping[str, str], inherit: str, known: set[str]) -> list[Problem]:
    """Return one problem for all variables of the shell that no key names, with the setting that inherits them.

    Variables that an earlier run of this process set have a separate problem. known: variables that the run sets or refuses.
    """
    earlier = environ.get(EXPORTED, "").split(",")
    found = {
        n: value for n, value in select_variables(environ).items() if value and n not in known and not _matches(n, inherit)
    }
    problems = []
    if left := {name: value for name, value in found.items() if name in earlier}:
        words = " ".join(f"{name}={value}" for name, value in left.items())
        problems.append(Problem("environment", words, "was set by an earlier run of this process", "Begin a new process."))
    if others := {name: value for name, value in found.items() if name not in earlier}:
        words = " ".join(f"{name}={value}" for name, value in others.items())
        rule = "set in the shell, changes how a run goes, and the config does not name it"
        names = ",".join([*parts_of(inherit), *others])
        remedy = (
            f"Unset it (unset {' '.join(others)}), or make it part of the run: --config.env.inherit={names} takes it as it "
        )
        problems.append(Problem("environment", words, rule, f"{remedy}stands, --config.env.set=NAME=VALUE sets another value."))
    return problems


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in (*SITE, *parts_of(patterns)))


def _overlay(chosen: Mapping[str, tuple[str, str]], environ: Mapping[str, str]) -> Overlay:
    inherited = {name: value for name, value in select_variables(environ).items() if name not in chosen}
    why = {}
    for name, (value, reason) in chosen.items():
        there = environ.get(name) or value
        why[name] = reason if there == value else f"{reason}; in place of the shell's {there}"
    return Overlay({name: value for name, (value, _) in chosen.items()}, why, inherited)
