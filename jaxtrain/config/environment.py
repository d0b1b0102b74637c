"""The environment variables of a run: a table for each GPU, variables of the shell, which override it, and `env.set`.

A variable of the shell is refused only if JAX would not start or train with it, or if the same config would silently give other
results. The log and the receipt name all others. Imports no jax: the variables must be set before jax is imported.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Mapping

from jaxtrain.config.hardware import HOST_LIMIT, NCCL_ALGO, Devices, memory_environment, memory_fraction, pinned_limit_gib
from jaxtrain.config.schema import Problem, RunConfig, Train, split_items

# Variable -> (value, reason); value None: it stays unset.
Table = Mapping[str, tuple[str | None, str]]

ALL: Table = {
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "a GPU has one number in CUDA, NVML, nvidia-smi and the receipt"),
    "NCCL_DEBUG": ("WARN", "an error of NCCL's comes with its reason; nothing is printed otherwise"),
    "NCCL_NVLS_ENABLE": (None, "NCCL sums in the switches where there are any; train.deterministic forbids it"),
    "NCCL_PROTO": (None, "NCCL chooses by size; one protocol for all sizes costs the others"),
    "NCCL_MNNVL_ENABLE": (None, "NVLink ends at the node (HGX): with 1 NCCL looks for links between nodes and fails"),
}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# By compute capability (hardware.Gpu.sm): the differences between generations.
TABLES: Mapping[int, Table] = {
    80: ALL | {CONNECTIONS: (None, "NVIDIA's JAX images set 1 on Hopper alone")},
    90: ALL | {CONNECTIONS: (None, "NVIDIA's JAX images set 1; the command bench --suite=node measures whether it pays")},
    100: ALL | {CONNECTIONS: (None, "NVIDIA's JAX guide advises against 1 from Blackwell on")},
}

OFF, ON = ("0", "false", "f", "no", "n", "off"), ("1", "true", "t", "yes", "y", "on")
# Variable -> (values that change nothing, what any other value does). An empty value changes nothing.
Values = Mapping[str, tuple[tuple[str, ...], str]]
# With these no run can train.
STOPS: Values = {
    "JAX_DISABLE_JIT": (OFF, "JAX then refuses to compile the train step"),
    "JAX_CHECK_TRACER_LEAKS": (OFF, "JAX then refuses to compile the train step"),
    "JAX_NO_TRACING": (OFF, "JAX then refuses to compile the train step"),
    "JAX_NO_EXECUTION": (OFF, "JAX then computes nothing"),
    "JAX_TRANSFER_GUARD": (("allow", "log"), "JAX then refuses to copy numbers to the devices"),
    "JAX_NUMPY_DTYPE_PROMOTION": (("standard",), "JAX then refuses operations on arrays of two dtypes"),
}
# These are refused in the shell alone: `env.set` makes them part of the config.
CHANGES: Values = {
    "JAX_ENABLE_X64": (OFF, "arrays without a dtype of their own then have 64 bits"),
    "JAX_DEFAULT_MATMUL_PRECISION": (("default",), "it replaces the precision of matmuls that name none"),
    "JAX_DEFAULT_PRNG_IMPL": (("threefry2x32",), "train.seed then gives other random numbers"),
    "JAX_THREEFRY_PARTITIONABLE": (ON, "train.seed then gives other random numbers"),
    "JAX_RANDOM_SEED_OFFSET": (("0",), "it is added to train.seed"),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": (OFF, "the program then rounds differently, and is slow"),
    "NVIDIA_TF32_OVERRIDE": ((), "cuBLAS and cuDNN follow it, and not the precision that the program asks for"),
}

# Names that change results or speed.
PREFIXES = ("NCCL_", "XLA_", "JAX_", "CUDA_", "CUDNN_", "CUBLAS_", "CUBLASLT_", "NVTE_", "NVIDIA_TF32_OVERRIDE")
PREFIXES += ("TF_CUDA_", "TF_FORCE_", "TF_GPU_", "TF_PER_DEVICE_")  # XLA's, and not Terraform's
# Selection of devices and processes: hardware.probe and distributed.detect read them (OPTIONS in runtime/cluster.py),
# except JAX_COORDINATOR_BIND_ADDRESS, which JAX reads in process 0.
SELECTION = (
    *("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES", "JAX_COORDINATOR_*"),
    *("JAX_LOCAL_DEVICE_IDS", "JAX_NUM_PROCESSES", "JAX_PROCESS_*"),
)
# Exceptions from PREFIXES: names without an effect, and names that another module handles.
HARMLESS = (
    *SELECTION,
    *("JAX_LOGGING_LEVEL", "JAX_DEBUG_LOG_MODULES", "JAX_TRACEBACK_FILTERING", "CUDA_CACHE_*", "*_VERSION"),
    "JAX_COMPILATION_CACHE_DIR",  # paths.cache decides
    # Where a toolkit lies.
    *(f"{library}_{place}" for library in ("CUDA", "CUDNN", "NCCL") for place in ("*HOME", "*PATH*", "*ROOT*", "*DIR")),
)
# Messages, a site's network and the memory of a host: they may differ from host to host.
HOST_VARIABLES = ("NCCL_DEBUG*", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE", HOST_LIMIT)
# Parts of the name of a variable whose value must not be in a log or receipt.
SECRET = ("TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH", "API_KEY", "ACCESS_KEY", "PRIVATE")
# Variables that the dynamic loader, the shell, Python or a check reads before the config is read.
TOO_LATE = (
    *SELECTION,
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH", "PYTHONHASHSEED", "JAXTRAIN_*", "SLURM_*", HOST_LIMIT),
)
EXPORTED = "JAXTRAIN_EXPORTED"  # JSON, name -> value: set by an earlier run of this process, or by the one that started it


@dataclasses.dataclass(frozen=True)
class Overlay:
    """The environment variables that a run sets, and those that it takes from the shell, with the reason for each."""

    set: dict[str, str] = dataclasses.field(default_factory=dict)
    inherited: dict[str, str] = dataclasses.field(default_factory=dict)
    why: dict[str, str] = dataclasses.field(default_factory=dict)

    def common(self) -> dict[str, str]:
        """Return the variables that must be equal on all processes: all but those in HOST_VARIABLES."""
        return {name: value for name, value in (self.inherited | self.set).items() if not _matches(name, HOST_VARIABLES)}

    def lines(self) -> list[str]:
        """Return lines for the log: each variable with its reason."""
        return [f"environment: {name}={value} ({self.why[name]})" for name, value in (self.inherited | self.set).items()]


def gpu_table(sm: int) -> Table:
    """Return a GPU's table of variables; if it has none, that of the next older GPU. sm: its compute capability times ten."""
    return TABLES.get(max((older for older in TABLES if older <= sm), default=0), ALL)


def is_secret(name: str) -> bool:
    """Return whether the name of a variable suggests a secret."""
    return any(word in name.upper() for word in SECRET)


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with a value that change the results or the speed of a run, without secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if value and name.startswith(PREFIXES) and not is_secret(name) and not _matches(name, HARMLESS)
    }


def exported_names(environ: Mapping[str, str]) -> set[str]:
    """Return the names in EXPORTED that still have the value there: these are no variables of the shell."""
    return {name for name, value in json.loads(environ.get(EXPORTED) or "{}").items() if environ.get(name) == value}


def parse_variables(text: str) -> tuple[dict[str, str], list[Problem]]:
    """Return `env.set` as name -> value, and its problems."""
    variables: dict[str, str] = {}
    problems = []
    for item in split_items(text):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not name.replace("_", "a").isalnum() or name[:1].isdigit():
            problems.append(Problem("env.set", item, "must be NAME=VALUE", "For example NCCL_CROSS_NIC=1."))
        elif name in variables:
            problems.append(Problem("env.set", item, f"{name} is named twice", "Keep one of them."))
        elif is_secret(name):
            rule = "its name suggests a secret, and the log and the receipt contain the values set here"
            problems.append(Problem("env.set", name, rule, "Set it in the shell that starts the run."))
        elif _matches(name, TOO_LATE):
            rule = f"{name} is read before the config is"
            remedy = f"Set it in the shell that starts the run, and leave {name} out here."
            problems.append(Problem("env.set", item, rule, remedy))
        else:
            variables[name] = value.replace("+", ",")
    return variables, problems


def overlay(run: RunConfig, devices: Devices, environ: Mapping[str, str]) -> tuple[Overlay, list[Problem]]:
    """Return the variables that a run sets or takes from the shell, and the problems of these variables.

    The table of the GPU and the memory budget apply on GPUs only.
    """
    config_vars, problems = parse_variables(run.env.set)
    earlier = exported_names(environ)
    shell = {name: value for name, value in environ.items() if name not in earlier}
    variable_problems = refuse(shell | config_vars, STOPS)
    variable_problems += refuse({name: value for name, value in shell.items() if name not in config_vars}, CHANGES)
    chosen = {name: (value, "env.set") for name, value in config_vars.items()}
    defaults: Table = {}
    if devices.kind == "gpu" and devices.count:
        limit = str(int(pinned_limit_gib({})))
        defaults = {**gpu_table(devices.sm), HOST_LIMIT: (limit, "memory of the host that copies of the state may pin, GiB")}
        decided, contradictions = _derive_variables(run.train, devices, shell | config_vars)
        chosen = {name: (v, why) for name, (v, why) in defaults.items() if v and not shell.get(name)} | chosen | decided
        variable_problems += contradictions
    problems += _as_config_problems(variable_problems, config_vars)
    inherited = {name: value for name, value in select_variables(shell).items() if name not in chosen}
    why = {}
    for name, value in inherited.items():
        default, reason = defaults.get(name, (value, ""))
        instead = f"the default is {default}" if default else f"unset by default: {reason}"
        why[name] = "from the shell" if value == default else f"from the shell; {instead}"
    for name, (value, reason) in chosen.items():
        shell_value = shell.get(name) or value
        why[name] = reason if shell_value == value else f"{reason}; in place of the shell's {shell_value}"
    return Overlay({name: value for name, (value, _) in chosen.items()}, inherited, why), problems


def refuse(variables: Mapping[str, str], values: Values) -> list[Problem]:
    """Return a problem for each variable with another value than those that change nothing."""
    return [
        Problem(name, value, rule, "Unset it.")
        for name, (harmless, rule) in values.items()
        if (value := variables.get(name)) and value.lower() not in harmless
    ]


def _as_config_problems(problems: Iterable[Problem], config_vars: Mapping[str, str]) -> list[Problem]:
    """Return problems of variables, with the key env.set and its remedy for those that `env.set` sets (config_vars)."""
    return [
        Problem("env.set", f"{p.key}={p.value}", p.rule, p.remedy.replace("Unset it", f"Leave {p.key} out here", 1))
        if p.key in config_vars
        else p
        for p in problems
    ]


def _derive_variables(
    train: Train, devices: Devices, environ: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], list[Problem]]:
    """Return the variables that other keys decide (memory, deterministic sums), and problems of contradicting variables."""
    fraction = memory_fraction(devices.memory_gib, train.memory_fraction)
    memory, problems = memory_environment(fraction, environ)
    decided = {name: (value, "train.memory_fraction") for name, value in memory.items()}
    if train.deterministic:
        if (value := environ.get("NCCL_ALGO")) and value != NCCL_ALGO:
            rule = f"train.deterministic sets {NCCL_ALGO}: sums in switches (NVLS) have no fixed order"
            problems.append(Problem("NCCL_ALGO", value, rule, "Unset it, or set train.deterministic=false."))
        decided["NCCL_ALGO"] = (NCCL_ALGO, "train.deterministic")
    return decided, problems


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)
