"""Properties of GPUs, the devices of this machine, and the memory budget of a run. Imports no jax.

Peaks are dense rates. Data sheets print rates with 2:4 sparsity, which are twice as high and which training never reaches.
`lookup` returns None for a GPU that is not in the table: no MFU is better than an MFU of a wrong peak.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from jaxtrain.config.schema import Problem

# GiB of every GPU left to NCCL buffers and the CUDA context, which JAX does not allocate. XLA allocates cuDNN's workspace, so
# the reserve does not include it. The reserve is a budget and not a measurement. train.memory_fraction changes JAX's fraction.
RESERVE_GIB = 6.0
# On small cards, the reserve is at most this fraction of memory, which leaves JAX its own default of 75%.
RESERVE_MOST = 0.25
WITHOUT_GPUS = "set JAX_PLATFORMS=cpu to run without GPUs"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU model. Rates are dense TFLOP/s (0: the GPU lacks the format), memory is in the data sheet's GB.

    `hbm_gb` is the nominal size; a driver's figure differs by up to two percent, so budgets use the reported size.
    `nvlink_gb_s` counts both directions, as data sheets do. `sm` is the compute capability times ten.
    """

    name: str
    sm: int
    bf16: float
    fp8: float
    tf32: float
    f32: float
    hbm_gb: float
    hbm_tb_s: float
    nvlink_gb_s: float
    source: str

    def peak(self, precision: str) -> float:
        """Return the dense TFLOP/s of matmuls with `config.precision`: f32 runs as full float32, not as tf32."""
        return {"bf16": self.bf16, "fp8": self.fp8, "f32": self.f32}[precision]


A100_SHEET = "NVIDIA A100 data sheet"
H100_SHEET = "NVIDIA H100 data sheet and H100 architecture white paper"
H200_SHEET = "NVIDIA H200 data sheet"
GH200_SHEET = "NVIDIA GH200 data sheet"
B200_SHEET = "NVIDIA HGX B200 specifications, per GPU"
GB200_SHEET = "NVIDIA GB200 NVL72 specifications, divided by its 72 GPUs"

# Pattern of the full device kind (after an optional "NVIDIA ") -> GPU. Patterns match in full, so a MIG slice, a GB300 or a
# reduced export model is unknown and not mistaken for a similar GPU. More specific patterns come first. fmt: off
TABLE: tuple[tuple[str, Gpu], ...] = (
    (r"A100-SXM4-40GB", Gpu("A100 SXM 40GB", 80, 312.0, 0.0, 156.0, 19.5, 40, 1.555, 600, A100_SHEET)),
    (r"A100-PCIE-40GB", Gpu("A100 PCIe 40GB", 80, 312.0, 0.0, 156.0, 19.5, 40, 1.555, 600, A100_SHEET)),
    (r"A100-SXM4-80GB", Gpu("A100 SXM 80GB", 80, 312.0, 0.0, 156.0, 19.5, 80, 2.039, 600, A100_SHEET)),
    (r"A100 80GB PCIe", Gpu("A100 PCIe 80GB", 80, 312.0, 0.0, 156.0, 19.5, 80, 1.935, 600, A100_SHEET)),
    (r"H100 NVL", Gpu("H100 NVL", 90, 835.5, 1670.5, 417.5, 60.0, 94, 3.9, 600, H100_SHEET)),
    (r"H100 PCIe", Gpu("H100 PCIe", 90, 756.0, 1513.0, 378.0, 51.0, 80, 2.0, 600, H100_SHEET)),
    (r"H100( SXM5?)?( 80GB HBM3)", Gpu("H100 SXM", 90, 989.4, 1978.9, 494.7, 66.9, 80, 3.35, 900, H100_SHEET)),
    (r"H200 NVL", Gpu("H200 NVL", 90, 835.5, 1670.5, 417.5, 60.0, 141, 4.8, 900, H200_SHEET)),
    (r"H200( SXM5?)?( 141GB HBM3e)?", Gpu("H200 SXM", 90, 989.4, 1978.9, 494.7, 66.9, 141, 4.8, 900, H200_SHEET)),
    (r"GH200 144G HBM3e", Gpu("GH200 144GB", 90, 989.4, 1978.9, 494.7, 66.9, 144, 4.9, 900, GH200_SHEET)),
    (r"GH200 480GB", Gpu("GH200 96GB", 90, 989.4, 1978.9, 494.7, 66.9, 96, 4.0, 900, GH200_SHEET)),
    (r"B200", Gpu("B200", 100, 2250.0, 4500.0, 1125.0, 75.0, 180, 8.0, 1800, B200_SHEET)),
    (r"GB200", Gpu("GB200", 100, 2500.0, 5000.0, 1250.0, 80.0, 186, 8.0, 1800, GB200_SHEET)),
)
# fmt: on


def lookup(device_kind: str) -> Gpu | None:
    """Return the GPU of JAX's `device_kind` (or the driver's product name); None if the table lacks it."""
    name = re.sub(r"^NVIDIA\s+", "", device_kind.strip(), flags=re.IGNORECASE)
    for pattern, gpu in TABLE:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return gpu
    return None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run. kind: cpu or gpu. memory_gib: memory of one device. source: origin of this information.

    CPU devices of one process share the memory that is available to the process: `memory_gib` is an equal part of it.

    `sm` is the compute capability times ten (90: Hopper), 0 if unknown. `node`: number of devices in one node; 0: all.
    `problem`: why `count` is 0, if the reason is known.
    """

    kind: str
    name: str
    count: int
    memory_gib: float
    source: str
    sm: int = 0
    node: int = 0
    problem: Problem | None = None

    def __post_init__(self):
        if not self.sm and self.gpu:
            object.__setattr__(self, "sm", self.gpu.sm)

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU's entry in TABLE; None on CPU and for an unknown GPU."""
        return lookup(self.name) if self.kind == "gpu" else None


def probe(environ: Mapping[str, str] | None = None) -> Devices:
    """Return the devices of this process as JAX will find them, without starting JAX.

    JAX_PLATFORMS decides first: cpu, or cuda or gpu. The number of CPU devices is in JAX_NUM_CPU_DEVICES, else in XLA_FLAGS.
    GPUs are those that the driver reports through NVML and CUDA_VISIBLE_DEVICES selects. `count` is 0 if JAX_PLATFORMS asks for
    a GPU and there is none, or for another platform, if JAX_PLATFORM_NAME or JAX_CUDA_VISIBLE_DEVICES would make JAX start
    other devices, if JAX_NUM_CPU_DEVICES is no number, if CUDA_VISIBLE_DEVICES names no existing GPU, if the driver fails, or
    if there are GPUs and no CUDA plugin of JAX: a CPU is no substitute. Unless JAX_PLATFORMS asks for a GPU, the devices are
    CPUs if there is no driver or GPU, or if CUDA_VISIBLE_DEVICES is "" or -1.
    """
    environ = os.environ if environ is None else environ
    devices = _find_devices(environ)
    name = environ.get("JAX_PLATFORM_NAME", "")
    if devices.count and name and (name.lower() == "cpu") != (devices.kind == "cpu"):
        rule = f"contradicts the devices of the run, {devices.kind} ({devices.source})"
        problem = Problem("JAX_PLATFORM_NAME", name, rule, "Unset it; JAX_PLATFORMS=cpu or cuda chooses the devices.")
        return Devices(devices.kind, "", 0, 0.0, str(problem), problem=problem)
    return devices


def _find_devices(environ: Mapping[str, str]) -> Devices:
    platform = environ.get("JAX_PLATFORMS", "").lower().split(",")[0].strip()
    if platform == "cpu":
        return _cpu(environ, "JAX_PLATFORMS=cpu")
    if platform not in ("", "cuda", "gpu"):
        rule = "is no platform of jaxtrain, which trains on NVIDIA's GPUs (cuda) or on CPUs (cpu)"
        problem = Problem("JAX_PLATFORMS", environ["JAX_PLATFORMS"], rule, "Unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu.")
        return Devices("gpu", "", 0, 0.0, str(problem), problem=problem)
    try:
        gpus, why = _gpus(environ)
    except InvisibleGpu as error:
        return Devices("gpu", "", 0, 0.0, str(error.problem), problem=error.problem)
    masked = environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    if gpus and masked not in ("", "all"):
        rule = "chooses GPUs for JAX alone, and jaxtrain counts those of CUDA_VISIBLE_DEVICES"
        remedy = "Unset it: CUDA_VISIBLE_DEVICES chooses the GPUs."
        problem = Problem("JAX_CUDA_VISIBLE_DEVICES", masked, rule, remedy)
        return Devices("gpu", "", 0, 0.0, str(problem), problem=problem)
    if gpus and not has_cuda_plugin():
        rule = f"the driver reports {len(gpus)} x {gpus[0][0]}, and no CUDA plugin of JAX is installed"
        problem = Problem("devices", None, rule, f"Run JAXTRAIN_CUDA=12 ./run.sh setup, or {WITHOUT_GPUS}.")
        return Devices("gpu", "", 0, 0.0, str(problem), problem=problem)
    if gpus:
        # The mesh needs equal devices: all get the name of the first GPU, and the least memory and capability.
        names, memories, sms = zip(*gpus, strict=True)
        return Devices("gpu", names[0], len(gpus), min(memories), "NVML", min(sms))
    if platform in ("cuda", "gpu"):
        problem = Problem("JAX_PLATFORMS", platform, f"no GPU to run on: {why}", "Unset JAX_PLATFORMS.")
        return Devices("gpu", "", 0, 0.0, str(problem), problem=problem)
    return _cpu(environ, why)


def _cpu(environ: Mapping[str, str], why: str) -> Devices:
    count, source = 1, why
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    if flag:
        count, source = int(flag[1]), f"{why}; XLA_FLAGS"
    number = environ.get("JAX_NUM_CPU_DEVICES", "")
    if re.fullmatch(r"\d+", number):
        count, source = int(number), f"{why}; JAX_NUM_CPU_DEVICES"
    elif number and number != "-1":  # JAX's default
        problem = Problem("JAX_NUM_CPU_DEVICES", number, "must be a whole number, 1 or more", "Set JAX_NUM_CPU_DEVICES=1.")
        return Devices("cpu", "cpu", 0, 0.0, str(problem), problem=problem)
    return Devices("cpu", "cpu", count, available_gib() / max(count, 1), source)


def _gpus(environ: Mapping[str, str]) -> tuple[list[tuple[str, float, int]], str]:
    """Return (name, memory in GiB, compute capability x 10) of every visible GPU, or none and the reason."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return [], f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver ({error})"
    try:
        return [_describe(handle) for handle in visible_handles(visible, pynvml)], "the driver reports no GPU"
    except pynvml.NVMLError as error:
        rule = f"the driver fails when it is asked for the GPUs ({error})"
        remedy = f"Run nvidia-smi to see which GPU fails, or {WITHOUT_GPUS}."
        raise InvisibleGpu(Problem("devices", None, rule, remedy)) from None
    finally:
        pynvml.nvmlShutdown()


def has_cuda_plugin() -> bool:
    """Return whether JAX's CUDA plugin is installed, which has XLA's GPU compiler."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    )


def _describe(handle: Any) -> tuple[str, float, int]:
    name = pynvml.nvmlDeviceGetName(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 2**30
    return (name.decode() if isinstance(name, bytes) else name), memory, 10 * major + minor


class InvisibleGpu(ValueError):
    """CUDA_VISIBLE_DEVICES or the driver leaves no usable GPU. `problem` has the reason."""

    def __init__(self, problem: Problem):
        self.problem = problem
        super().__init__(str(problem))


def visible_handles(visible: str | None, nvml: Any = pynvml) -> list[Any]:
    """Return NVML handles in the order of CUDA_VISIBLE_DEVICES. Like CUDA, the list ends at the first number that is no GPU.

    An entry may be the beginning of a UUID (GPU-1a2b) that only one GPU has, as the driver allows. NVML must be
    initialised, by `nvml.nvmlInit()`. Raises nvml.NVMLError if the driver fails. Raises InvisibleGpu for a MIG slice, for a
    UUID that none or several GPUs have, or for a list whose first entry is no GPU.
    """
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    handles = []
    for entry in (each.strip() for each in visible.split(",")):
        if entry.isdigit() and int(entry) < count:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith("GPU-"):
            matches = [i for i in range(count) if _uuid(i, nvml).startswith(entry)]
            if len(matches) != 1:
                raise _invisible(visible, f"{len(matches) or 'no'} GPUs have a UUID that begins with {entry}")
            handles.append(nvml.nvmlDeviceGetHandleByIndex(matches[0]))
        elif entry.startswith("MIG-"):
            raise _invisible(visible, f"{entry} is a MIG slice, and a run takes whole GPUs")
        else:
            break
    if count and not handles:
        raise _invisible(visible, f"there is no GPU {visible.split(',')[0].strip()!r}")
    return handles


def _uuid(index: int, nvml: Any) -> str:
    """Return a GPU's UUID; "" if the driver has lost this GPU, so that the other GPUs can still be used."""
    try:
        uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return ""
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def _invisible(visible: str, rule: str) -> InvisibleGpu:
    remedy = f"Set CUDA_VISIBLE_DEVICES=0 for the first GPU, or unset it for all; nvidia-smi -L lists them. Or {WITHOUT_GPUS}."
    return InvisibleGpu(Problem("CUDA_VISIBLE_DEVICES", visible, rule, remedy))


def memory_fraction(total_gib: float, configured: float = 0.0) -> float:
    """Return the fraction of a GPU's memory that JAX preallocates: `configured`, or all but the reserve if it is 0.

    The reserve is RESERVE_GIB, but at most the fraction RESERVE_MOST of the memory.
    """
    if configured > 0:
        return configured
    return round(1 - min(RESERVE_GIB, RESERVE_MOST * total_gib) / total_gib, 4)


# Settings for the same bits at each run of a program on GPUs: XLA's options, and NCCL's algorithms (as in Megatron-LM's guide
# to deterministic training).
REPEATABLE = {"xla_gpu_deterministic_ops": True, "xla_gpu_exclude_nondeterministic_ops": True}
NCCL_ALGO = "^NVLS"

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # pinned host memory of a process; XLA's default is 64
HOST_SHARE = 0.8  # fraction of the host's memory that may be pinned for copies of the state while they are saved


def host_gib() -> float:
    """Return the memory of this machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def available_gib(root: str | os.PathLike[str] = "/") -> float:
    """Return the GiB that this process can still allocate: the least of MemAvailable and the limits of its memory cgroups.

    root: the folder that holds proc and sys; for tests. Without /proc, all memory of this machine counts as available.
    """
    base = Path(root)
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(base / "proc/meminfo"), re.MULTILINE)
    limits = [int(match[1]) * 1024 if match else round(host_gib() * 2**30)]
    mounts = base / "sys/fs/cgroup"
    for line in _text(base / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if controllers and not v1:
            continue
        mount, name = (mounts / "memory", "memory.limit_in_bytes") if v1 else (mounts, "memory.max")
        group = Path(group.lstrip("/"))
        # A limit of a parent applies to its children too. In a container the path may be that of the host, while the mount is
        # the container's.
        limits += [int(text) for each in (group, *group.parents) if (text := _text(mount / each / name).strip()).isdigit()]
    return min(limits) / 2**30


def _text(path: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def pinned_limit_gib(environ: Mapping[str, str]) -> float:
    """Return the GiB of host memory that a process may pin for copies of the state.

    The limit is the value of the variable HOST_LIMIT; if it is unset, the fraction HOST_SHARE of the host's memory.
    """
    return float(environ.get(HOST_LIMIT) or int(HOST_SHARE * host_gib()))


def memory_environment(fraction: float, environ: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the variables that make JAX take `fraction` of each GPU's memory, and the problems of contradicting variables.

    The variables must be exported before JAX is imported. JAX reads the fraction when it initialises its GPU backend,
    and takes 75% by default. JAX must preallocate the memory: otherwise the fraction is no budget.
    """
    name = "XLA_CLIENT_MEM_FRACTION"
    problems = []

    def refuse(variable: str, rule: str, remedy: str) -> None:
        problems.append(Problem(variable, environ[variable], rule, remedy))

    instead = "Unset it, and set train.memory_fraction."
    if environ.get(name):
        try:
            same = abs(float(environ[name]) - fraction) < 1e-6
        except ValueError:
            same = False
        if not same:
            refuse(name, f"contradicts train.memory_fraction, which gives {fraction}", instead)
    old = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if environ.get(old):
        refuse(old, f"is the old name of {name}; jax refuses both together", instead)
    preallocate = "XLA_PYTHON_CLIENT_PREALLOCATE"
    if environ.get(preallocate, "") in ("false", "False", "0"):
        refuse(preallocate, "without preallocation the memory budget is not kept", "Unset it.")
    allocator = "XLA_PYTHON_CLIENT_ALLOCATOR"
    if environ.get(allocator, "default").lower() not in ("default", "bfc"):
        refuse(allocator, "the memory budget holds for the default allocator (bfc) only", "Unset it.")
    unified = "TF_FORCE_UNIFIED_MEMORY"
    if environ.get(unified, "").lower() in ("1", "true"):
        refuse(unified, "pages GPU memory to the host, so a run over budget becomes slow instead of failing", "Unset it.")
    return {name: str(fraction)}, problems
