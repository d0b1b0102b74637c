"""receipt.json: what ran. Written before the first step and completed at the end, so that a run that dies has one too.

The file holds the newest attempt at its top level and every earlier one of the same folder under `attempts`, oldest first. An
attempt whose `exit_code` is null was killed, or is still running. Only environment variables that change what is computed, or
how fast, are kept, and none whose name speaks of a secret. docs/receipts.md tells of the fields.
"""

import hashlib
import json
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pynvml

import jaxtrain
from jaxtrain import goodput, metrics
from jaxtrain.installed import versions
from jaxtrain.receipt import figures, machine, software
from jaxtrain.receipt.machine import device_facts as device_facts
from jaxtrain.receipt.software import environment as environment
from jaxtrain.receipt.source import git_state as git_state
from jaxtrain.receipt.source import own_files, source
from jaxtrain.receipt.stored import FORMAT as FORMAT
from jaxtrain.receipt.stored import ReceiptError as ReceiptError
from jaxtrain.receipt.stored import attempts as attempts
from jaxtrain.receipt.stored import load as load
from jaxtrain.receipt.stored import shortened

PREFLIGHT = "JAXTRAIN_PREFLIGHT"  # names the file in which run.sh has had the preflight of this start written
SAVES_KEPT = 10_000  # of an attempt, for their median


class Receipt:
    """The receipt of the run in `workdir`. Process 0 writes; on others only `id` and `fields` live, in memory.

    nvml: what tells of the GPUs of this node.
    """

    def __init__(self, workdir: str | Path, *, process_index: int = 0, nvml: Any = pynvml):
        self.path = Path(workdir) / "receipt.json"
        self.id = str(uuid.uuid4())
        self.fields: dict[str, Any] = {}
        self._active = process_index == 0
        self._nvml = nvml
        self._earlier: list[dict[str, Any]] = []  # as they stand in the file; the newest of them whole
        self._saves: list[Mapping[str, Any]] = []

    def start(self, fields: Mapping[str, Any], config_file: str | Path | None = None) -> None:
        """Write the receipt of this attempt: what can be found out here, and `fields` from the caller.

        Callers give `config` (name), `config_sha256` (see `config_sha256`), `resolved` (the config by `config.to_dict`),
        `devices` (see `device_facts`), `data` (fingerprint), `synthetic`, and `env`: what the run set, and took from the shell.
        config_file: whose digest is kept with those of the source.
        Raises ReceiptError if an earlier receipt is there that cannot be read.
        """
        earlier = load(self.path) if self._active and self.path.exists() else None
        if earlier is not None:
            self._earlier = [*earlier.pop("attempts"), earlier]
        found = {
            "format": FORMAT,
            "id": self.id,
            "attempt": len(self._earlier) + 1,
            "started": now(),
            "ended": None,
            "exit_code": None,
            "reason": None,
            "command": shlex.join(sys.orig_argv),
            "jaxtrain": jaxtrain.__version__,
            "python": platform.python_version(),
            "packages": versions(),
            "host": {"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
            "environment": environment(os.environ),
        }
        if self._active:  # the others' is never written
            own = own_files(fields.get("resolved", {}))
            found |= {
                "source": source(Path(jaxtrain.__file__).parent, Path(config_file) if config_file else None, own),
                "versions": software.native(self._nvml, os.environ),
                "hardware": machine.hardware(self._nvml),
                "preflight": preflight(os.environ),
                "launch": launch(os.environ),
            }
        if clash := sorted(set(found) & set(fields)):
            raise ValueError(f"the receipt finds {', '.join(clash)} itself; give these fields other names")
        self._set(found | dict(fields))

    def update(self, **fields: Any) -> None:
        """Add or replace fields, on disk at once."""
        self._set(self.fields | fields)

    def saved(self, one: Mapping[str, Any]) -> None:
        """A save has reached the disk: a `checkpoint.Saved` as a dict. `save` is the newest, `saves` tells of all."""
        self._saves = [*self._saves[1 - SAVES_KEPT :], one]
        self.update(save=dict(one), saves=figures.saves(self._saves))

    def finish(self, exit_code: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        """Close the attempt: how it ended, why in plain words, and any last figures.

        Then come the figures that the run's folder holds: speed, memory, loss and goodput.
        """
        self.update(**{**(fields or {}), "ended": now(), "exit_code": exit_code, "reason": reason})
        if self._active:  # a second write: what can fail may not cost the first
            self.update(**self._at_the_end())

    def _at_the_end(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        hardware = self.fields.get("hardware")
        if hardware and hardware["gpus"]:
            out["hardware"] = {**hardware, "after": machine.clocks(self._nvml)}
        folder = self.path.parent
        try:
            if (folder / "metrics.jsonl").exists():
                out |= figures.of_run(list(metrics.read(folder / "metrics.jsonl")), self.fields)
            if "goodput" not in self.fields and (ledger := goodput.read(folder / goodput.FILE)):
                out["goodput"] = goodput.summarise(ledger).record()
        except (OSError, ValueError) as error:  # a file that somebody else has damaged: the run has ended as it has
            out["no_figures"] = str(error)
        return out

    def _set(self, fields: Mapping[str, Any]) -> None:
        earlier = [*self._earlier[:-1], *(shortened(one, fields) for one in self._earlier[-1:])]
        # Last: the newest attempt is what a reader looks for.
        self.fields = {name: value for name, value in fields.items() if name != "attempts"} | {"attempts": earlier}
        if self._active:
            metrics.write_atomic(self.path, json.dumps(self.fields, indent=2) + "\n")


def preflight(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What preflight found before this start; None where there was none."""
    path = environ.get(PREFLIGHT)
    if not path:
        return None
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return {"error": f"{PREFLIGHT}={path}: {error}"}


def launch(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What run.sh found before Python started; None for a run that it did not start."""
    if "JAXTRAIN_HOST_CLASS" not in environ:
        return None
    dirty = {"yes": True, "no": False}.get(environ.get("JAXTRAIN_DIRTY", ""))
    host = environ["JAXTRAIN_HOST_CLASS"]
    return {"commit": environ.get("JAXTRAIN_COMMIT") or None, "dirty": dirty, "host_class": host, "by": "run.sh"}


def now() -> str:
    """Local time with its offset, to the second, as ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Hash of a resolved config (`config.to_dict`); the order of keys does not count."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
