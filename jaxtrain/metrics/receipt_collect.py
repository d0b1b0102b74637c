"""The software of a run: plugin versions, container, environment variables, source files, and facts that run.sh found."""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.commands import PREFIX
from jaxtrain.config.environment import is_secret
from jaxtrain.config.schema import flatten
from jaxtrain.runtime import variables

ENVIRONMENT_PREFIXES = (
    *("XLA_", "JAX_", "JAXTRAIN_", "NCCL_", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_TF32_OVERRIDE", "TF_GPU_", "FI_", "UCX_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD"),  # they can load another cuDNN or NCCL than that of the wheels
    *("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_PROCID"),
)
# Variables of a single attempt, which are in the receipt as `restart` and `preflight`, and the prefix of printed commands.
LEFT_OUT = (*variables.OF_AN_ATTEMPT, PREFIX)
CONTAINERS = (Path("/run/.containerenv"), Path("/.dockerenv"))  # files that exist in containers of podman and of Docker
PATCH_MOST = 200_000  # characters; a receipt should stay readable, and every save rewrites it


def select_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can change results or speed, sorted by name, without secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and name not in LEFT_OUT and not is_secret(name)
    }


def plugin_versions() -> dict[str, str] | None:
    """Return the CUDA and cuDNN versions that jax's GPU plugin was built with; None if they are unknown."""
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            built: Any = importlib.import_module(f"{name}._versions")
            cuda, cudnn = built.cuda_runtime_build_version(), built.cudnn_build_version()
        except (ImportError, AttributeError):  # the module is private, and some versions do not have it
            return None
        # CUDA 12.9 is 12090, cuDNN 9.10.2 is 91002.
        return {
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        }
    return None


def container(environ: Mapping[str, str]) -> str | None:
    """Return the image's name in a container, from JAXTRAIN_IMAGE (set by deploy/Dockerfile); None outside of containers."""
    return environ.get("JAXTRAIN_IMAGE") or ("unnamed image" if any(path.exists() for path in CONTAINERS) else None)


def launch(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return `commit`, `dirty` and `host_class` from the variables that run.sh set; None if run.sh did not start this run."""
    if variables.HOST_CLASS not in environ:
        return None
    dirty = {"yes": True, "no": False}.get(environ.get(variables.DIRTY, ""))
    return {"commit": environ.get(variables.COMMIT) or None, "dirty": dirty, "host_class": environ[variables.HOST_CLASS]}


def read_preflight(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return all findings of preflight, from the file that preflight wrote; None if preflight did not run."""
    path = environ.get(variables.PREFLIGHT)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError) as error:
        return {"error": f"{variables.PREFLIGHT}={path}: {error}"}


def shorten_preflight(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return preflight's findings without passed checks: the receipt must be short, since every save rewrites it.

    A passed check of vboost remains: vboost changes the speed, and NVML does not report it.
    """
    if not found or "nodes" not in found:
        return dict(found) if found else None
    nodes = [
        {**node, "checks": [c for c in node.get("checks", ()) if c.get("state") != "ok" or c.get("name") == "vboost"]}
        for node in found["nodes"]
    ]
    return {**found, "nodes": nodes}


def source(package: Path, config_file: Path | None, own: Iterable[Path]) -> dict[str, Any]:
    """Return commit, local changes and file digests of the source code that this process runs.

    Args:
      package: the folder of jaxtrain.
      config_file: the config's file.
      own: files of the user's code that the config names as package.module:name.

    Returns:
      `commit` and `dirty`: None if git does not track the code, or git failed. `error`: only if git failed. `patch`: git diff
      HEAD of the package and the configs. `patch_cut`: number of characters left out at the patch's end. `files`: path from
      the repository's root -> SHA-256. `config_file`: the same for the config's file.
    """
    root = package.resolve().parent
    found: dict[str, Any] = {"commit": None, "dirty": None, "patch": "", "patch_cut": 0, **(git_state(package) or {})}
    if found["dirty"]:
        plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
        try:
            patch = _git(root, "diff", "HEAD", "--relative", *plain, "--", package.name, "configs").stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            patch = f"git diff failed: {error}\n"
        found |= {"patch": patch[:PATCH_MOST], "patch_cut": max(0, len(patch) - PATCH_MOST)}
    files = [*sorted(package.resolve().rglob("*.py")), *own]
    return found | {"files": _digests(files, root), "config_file": _digests([config_file] if config_file else [], root)}


def _digests(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """Return path relative to `root` -> SHA-256. The key of a file outside of `root` is its name: its folder may be private."""
    out = {}
    for path in (path.resolve() for path in paths if path.is_file()):
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        out[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out


def own_files(resolved: Mapping[str, Any]) -> list[Path]:
    """Return the files of the imported modules that a config names as package.module:name."""
    found = []
    for _, value in flatten(resolved):
        for name in re.findall(r"(?<![\w./])([A-Za-z_][\w.]*):[A-Za-z_]\w*", value) if isinstance(value, str) else ():
            file = getattr(sys.modules.get(name), "__file__", None)
            found += [Path(file)] if file else []
    return list(dict.fromkeys(found))


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit`, and `dirty`: whether tracked files differ from the commit. None: git does not track `folder`.

    If git is missing or fails (for example, because another user owns the checkout), the result is {"error": ...}.
    """
    try:
        head = _git(folder, "rev-parse", "HEAD")
        if head.returncode:
            return None if "not a git repository" in head.stderr else {"error": head.stderr.strip()}
        if _git(folder, "ls-files", "--error-unmatch", "__init__.py").returncode:
            return None  # jaxtrain is in a virtual environment inside another project's checkout
        status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def _git(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-c", "core.quotePath=false", "-C", str(folder), *args]
    # This module parses git's messages, so they must be in English. Optional locks could block a commit of another process.
    env = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False, env=env)
