"""Which software ran: packages, the CUDA libraries, the driver, the container, and the variables that change how a run goes."""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.commands import PREFIX
from jaxtrain.environment import secret
from jaxtrain.installed import version
from jaxtrain.receipt.machine import ask, opened
from jaxtrain.runtime.variables import OF_AN_ATTEMPT

ENVIRONMENT_PREFIXES = (
    "XLA_",
    "JAX_",
    "JAXTRAIN_",
    "NCCL_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS",
    "NVIDIA_TF32_OVERRIDE",
    "TF_GPU_",
    "LD_LIBRARY_PATH",  # another cuDNN or NCCL may stand before that of the wheels
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "FI_",
    "UCX_",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_PROCID",
)
# Variables of one attempt, which a receipt has as `restart` and `preflight`, and the spelling of commands.
LEFT_OUT = (*OF_AN_ATTEMPT, PREFIX)

# What is asked for most, and the wheels that bring it. A system's own libraries are not looked for: jax loads the wheels'
# first, unless LD_LIBRARY_PATH says otherwise, and that is kept.
WHEELS = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "cuda": ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
    "cudnn": ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
PODMAN = Path("/run/.containerenv")
DOCKER = Path("/.dockerenv")


def native(nvml: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """Versions below Python: `cuda`, `cudnn` and `nccl` by their wheels, `driver` and the newest CUDA that it runs
    (`driver_cuda`) by NVML, `built_for` what jax's plugin was built with, and the `container`. None where nothing tells."""
    found: dict[str, Any] = {name: next(filter(None, map(version, wheels)), None) for name, wheels in WHEELS.items()}
    with opened(nvml) as there:
        number = ask(nvml, "nvmlSystemGetCudaDriverVersion") if there else None
        found["driver"] = ask(nvml, "nvmlSystemGetDriverVersion") if there else None
        found["driver_cuda"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    return found | {"built_for": built_for(), "container": container(environ)}


def built_for() -> dict[str, str] | None:
    """The CUDA and cuDNN that jax's GPU plugin was built with; None where no plugin is installed, or it does not say."""
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            says: Any = importlib.import_module(f"{name}._versions")
            cuda, cudnn = says.cuda_runtime_build_version(), says.cudnn_build_version()
        except (ImportError, AttributeError):  # a private module, which is not in every version
            return None
        # CUDA writes 12.9 as 12090, cuDNN 9.10.2 as 91002.
        return {
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        }
    return None


def container(environ: Mapping[str, str]) -> str | None:
    """The image that this runs in: JAXTRAIN_IMAGE (deploy/Dockerfile sets it), or what podman says; None outside of containers
    and where nothing tells."""
    if environ.get("JAXTRAIN_IMAGE"):
        return environ["JAXTRAIN_IMAGE"]
    if PODMAN.is_file():
        told = dict(re.findall(r'^(\w+)="(.*)"$', PODMAN.read_text(), re.MULTILINE))
        if told.get("image"):
            return f"{told['image']} ({told['imageid']})" if told.get("imageid") else told["image"]
        return "an image without a name"
    return "an image without a name" if DOCKER.exists() else None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables worth keeping, by name; none whose name speaks of a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and name not in LEFT_OUT and not secret(name)
    }
