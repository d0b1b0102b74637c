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
from pathlib import Path
from typing import Any

import pynvml

import jaxtrain
from jaxtrain import goodput, metrics
from jaxtrain.installed import OF_A_RUN, versions
from jaxtrain.receipt import figures, machine, software
from jaxtrain.receipt.launched import launch, preflight, without_the_usual
from jaxtrain.receipt.lineage import of_checkpoint as of_checkpoint
from jaxtrain.receipt.lineage import of_weights as of_weights
from jaxtrain.receipt.machine import device_facts as device_facts
from jaxtrain.receipt.machine import rank_map as rank_map
from jaxtrain.receipt.software import environment as environment
from jaxtrain.receipt.source import git_state as git_state
from jaxtrain.receipt.source import own_files, source
from jaxtrain.receipt.stored import FORMAT as FORMAT
from jaxtrain.receipt.stored import ReceiptError as ReceiptError
from jaxtrain.receipt.stored import attempts as attempts
from jaxtrain.receipt.stored import load as load
from jaxtrain.receipt.stored import now as now
from jaxtrain.receipt.stored import shortened


class Receipt:
    """The receipt of the run in `workdir`. Process 0 writes; on others only `id` and `fields` live, in memory.

    nvml: what tells of the GPUs of this node. `preflight`: what that found before this start, whole; None where it was not run.
    """

    def __init__(self, workdir: str | Path, *, process_index: int = 0, nvml: Any = pynvml):
        self.path = Path(workdir) / "receipt.json"
        self.id = str(uuid.uuid4())
        self.fields: dict[str, Any] = {}
        self.preflight: dict[str, Any] | None = None
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
            "packages": versions(OF_A_RUN),
            "host": {
                "name": platform.node(),
                "system": "-".join((platform.system(), platform.release(), platform.machine())),
                "cpus": machine.processors(),
            },
            "environment": environment(os.environ),
        }
        if self._active:  # the others' is never written
            own = own_files(fields.get("resolved", {}))
            self.preflight = preflight(os.environ)
            found |= {
                "source": source(Path(jaxtrain.__file__).parent, Path(config_file) if config_file else None, own),
                "versions": software.native(self._nvml, os.environ),
                "hardware": machine.hardware(self._nvml),
                "preflight": without_the_usual(self.preflight),
                "launch": launch(os.environ),
            }
        if clash := sorted(set(found) & set(fields)):
            raise ValueError(f"the receipt finds {', '.join(clash)} itself; give these fields other names")
        self._set(found | dict(fields))

    def update(self, **fields: Any) -> None:
        """Add or replace fields, on disk at once."""
        self._set(self.fields | fields)

    def began(self, loaded: Mapping[str, Any] | None) -> None:
        """What the first state of this attempt was read from: `of_checkpoint` or `of_weights`; None: it was made from the seed.

        The first call counts: a run that goes back to an earlier step later on has begun as it has.
        """
        if "loaded" not in self.fields:
            self.update(loaded=dict(loaded) if loaded else None)

    def saved(self, one: Mapping[str, Any]) -> None:
        """A save has reached the disk: a `checkpoint.Saved` as a dict. `save` is the newest, `saves` tells of all."""
        self._saves.append(one)
        self.update(save=dict(one), saves=figures.saves(self._saves))

    def finish(self, exit_code: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        """Close the attempt: how it ended, why in plain words, and any last figures.

        Then come the figures that the run's folder holds, speed, memory, loss and goodput, and the GPUs as they are now.
        """
        self.update(**{**(fields or {}), "ended": now(), "exit_code": exit_code, "reason": reason})
        if self._active:  # a second write: what can fail may not cost the first
            self.update(**self._at_the_end())

    def _at_the_end(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        folder = self.path.parent
        try:
            if (folder / "metrics.jsonl").exists():
                out |= figures.of_run(list(metrics.read(folder / "metrics.jsonl")), self.fields)
            if "goodput" not in self.fields and (ledger := goodput.read(folder / goodput.FILE)):
                out["goodput"] = goodput.summarise(ledger).record()
            if (hardware := self.fields.get("hardware")) and hardware["gpus"]:
                out["hardware"] = {**hardware, "after": machine.clocks(self._nvml)}
        # Whatever it is, a damaged file or a driver that fails in its own way: the run has ended as it has, and its exit code,
        # which decides whether it is started again, must not become another one here.
        except Exception as error:
            out["no_figures"] = f"{type(error).__name__}: {error}"
        return out

    def _set(self, fields: Mapping[str, Any]) -> None:
        earlier = [*self._earlier[:-1], *(shortened(one, fields) for one in self._earlier[-1:])]
        # Last: the newest attempt is what a reader looks for.
        self.fields = {name: value for name, value in fields.items() if name != "attempts"} | {"attempts": earlier}
        if self._active:
            metrics.write_atomic(self.path, json.dumps(self.fields, indent=2) + "\n")


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Hash of a resolved config (`config.to_dict`); the order of keys does not count."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
