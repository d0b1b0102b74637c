"""receipt.json: what ran. Written before the first step and completed at the end, so that a run that dies has one too.

The file holds the newest attempt at its top level and every earlier one of the same folder under `attempts`, oldest first. An
attempt whose `exit_code` is null was killed, or is still running. Only environment variables that change what is computed, or
how fast, are kept, and none whose name speaks of a secret.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jaxtrain
from jaxtrain.metrics import write_atomic

FORMAT = 1

ENVIRONMENT_PREFIXES = (
    "XLA_",
    "JAX_",
    "JAXTRAIN_",
    "NCCL_",
    "CUDA_",
    "TF_GPU_",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_PROCID",
)
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_collections", "ml_dtypes", "tokenizers",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "nvidia-cudnn-cu12", "nvidia-nccl-cu12", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip


class ReceiptError(ValueError):
    """receipt.json cannot be read."""


class Receipt:
    """The receipt of the run in `workdir`. Process 0 writes; on others only `id` and `fields` live, in memory."""

    def __init__(self, workdir: str | Path, *, process_index: int = 0):
        self.path = Path(workdir) / "receipt.json"
        self.id = str(uuid.uuid4())
        self.fields: dict[str, Any] = {}
        self._active = process_index == 0

    def start(self, fields: Mapping[str, Any]) -> None:
        """Write the receipt of this attempt: what can be found out here, and `fields` from the caller.

        Callers give `config` (name), `config_sha256` (see `config_sha256`), `devices` (see `device_facts`), `data`
        (fingerprint) and `synthetic`. Raises ReceiptError if an earlier receipt is there that cannot be read.
        """
        earlier = load(self.path) if self._active and self.path.exists() else None
        attempts = []
        if earlier is not None:
            attempts = earlier.pop("attempts") + [earlier]
        found = {
            "format": FORMAT,
            "id": self.id,
            "attempt": len(attempts) + 1,
            "started": now(),
            "ended": None,
            "exit_code": None,
            "reason": None,
            "command": shlex.join(sys.orig_argv),
            "jaxtrain": jaxtrain.__version__,
            "python": platform.python_version(),
            "packages": versions(),
            "git": git_state(Path(__file__).parent),
            "host": {"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
            "environment": environment(os.environ),
        }
        self.fields = _merge(found, fields) | {"attempts": attempts}
        self._write()

    def update(self, **fields: Any) -> None:
        """Add or replace fields, on disk at once."""
        attempts = self.fields.pop("attempts")
        self.fields |= fields
        self.fields["attempts"] = attempts  # last: the newest attempt is what a reader looks for
        self._write()

    def finish(self, exit_code: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        """Close the attempt: how it ended, why in plain words, and any last figures."""
        self.update(**{**(fields or {}), "ended": now(), "exit_code": exit_code, "reason": reason})

    def _write(self) -> None:
        if self._active:
            write_atomic(self.path, json.dumps(self.fields, indent=2) + "\n")


def _merge(found: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if clash := sorted(set(found) & set(fields)):
        raise ValueError(f"the receipt finds {', '.join(clash)} itself; give these fields other names")
    return found | dict(fields)


def load(path: str | Path) -> dict[str, Any]:
    """A receipt from its file. Raises ReceiptError naming the file where it is none, or of a later format."""
    try:
        receipt = json.loads(Path(path).read_text())
        version, attempts = receipt["format"], receipt["attempts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReceiptError(f"{path}: not a receipt ({error!r}). Move it away, and the run writes a new one.") from error
    if version != FORMAT or not isinstance(attempts, list):
        raise ReceiptError(f"{path}: format {version!r}, this jaxtrain reads {FORMAT}. Use the version that wrote it.")
    return receipt


def now() -> str:
    """Local time with its offset, to the second, as ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Hash of a resolved config (`config.to_dict`); the order of keys does not count."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Installed versions of the packages that compute something; those not installed are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables worth keeping, by name."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and not any(word in name for word in SECRET_WORDS)
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it; None where `folder`'s code is not tracked by git (an installed one).

    A git that is missing or refuses (a checkout owned by another user) is told as {"error": ...}.
    """

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=30, check=False)

    try:
        head = git("rev-parse", "HEAD")
        if head.returncode:
            return None if "not a git repository" in head.stderr else {"error": head.stderr.strip()}
        if git("ls-files", "--error-unmatch", "__init__.py").returncode:
            return None  # a virtual environment inside somebody else's checkout
        status = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


class HasKind(Protocol):
    """A jax.Device, as far as `device_facts` looks at it."""

    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    @property
    def id(self) -> int: ...


def device_facts(devices: Iterable[HasKind]) -> dict[str, Any]:
    """Kinds, counts and the device ids of each process, from `jax.devices()`."""
    devices = list(devices)
    processes: dict[str, list[int]] = {}
    for device in devices:
        processes.setdefault(str(device.process_index), []).append(device.id)
    return {
        "platform": sorted({device.platform for device in devices}),
        "kind": sorted({device.device_kind for device in devices}),
        "count": len(devices),
        "process_count": len(processes),
        "processes": processes,
    }
