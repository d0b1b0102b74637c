"""receipt.json: code, settings, data and hardware of a run.

The receipt is written before the first step and completed at the end, so a killed run has a receipt too. The top level of the
file describes the newest attempt, and `attempts` has a summary of every other attempt. An attempt that starts after the last
step is moved to `attempts` when it ends. The last attempt that trained is then the top level again. An attempt without
`exit_code` was killed or still runs. docs/observing.md describes the contents.
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

from jaxtrain.config.installed import OF_A_RUN, VERSION, versions
from jaxtrain.config.launch import REPO
from jaxtrain.metrics import files, goodput, receipt_collect, receipt_figures, receipt_machine
from jaxtrain.metrics.receipt_format import FORMAT, NAME, load, now
from jaxtrain.train.receipt_diff import differences

# Fields of an earlier attempt that stay in the file. The newest attempt that saved a checkpoint keeps all fields, until the
# next such attempt is compared with it.
SUMMARY = (
    *("id", "attempt", "started", "ended", "exit_code", "reason", "command"),
    *("resumed_from_step", "loaded", "origin", "changed", "saves"),
)
SEED = {"from": None, "step": None, "saved_by": None, "digest": "made from train.seed"}


class Receipt:
    """The receipt of the run in `workdir`. Process 0 writes the file. Other processes have `id` and `fields` in memory.

    Attributes:
      fields: the contents of receipt.json.
      preflight: all findings of preflight before this attempt; None if preflight did not run.
      took_no_step: whether all steps were done before this attempt. Callers set it; `finish` reads it.
    """

    def __init__(self, workdir: str | Path, *, process_index: int = 0, nvml: Any = pynvml):
        """Create the receipt without writing it. nvml: pynvml, or an object with the same functions."""
        self.path = Path(workdir) / NAME
        self.id = str(uuid.uuid4())
        self.fields: dict[str, Any] = {}
        self.preflight: dict[str, Any] | None = None
        self.took_no_step = False
        self._active = process_index == 0
        self._nvml = nvml
        self._earlier: list[dict[str, Any]] = []
        self._saves: list[Mapping[str, Any]] = []

    def start(self, fields: Mapping[str, Any], config_file: str | Path | None = None) -> None:
        """Write the receipt of this attempt: `fields`, and facts about this process and node that this method collects.

        Args:
          fields: `config` (name), `config_sha256`, `resolved` (the config by `config.to_dict`), `devices`, `data` and
            `eval_data` (their fingerprints), `synthetic`, `env` (variables that the run set and inherited), and other fields.
          config_file: the config's file, whose digest is part of `source`.

        Raises ReceiptError if an earlier receipt cannot be read.
        """
        found: dict[str, Any] = {
            "format": FORMAT,
            "id": self.id,
            "attempt": 1,
            "started": now(),
            "ended": None,
            "exit_code": None,
            "reason": None,
            "command": shlex.join(sys.orig_argv),
            "jaxtrain": VERSION,
            "python": platform.python_version(),
            "packages": versions(OF_A_RUN),
            "host": {
                "name": platform.node(),
                "system": "-".join((platform.system(), platform.release(), platform.machine())),
                "cpus": receipt_machine.processors(),
            },
            "environment": receipt_collect.select_environment(os.environ),
        }
        if self._active:
            own = receipt_collect.own_files(fields.get("resolved", {}))
            hardware, driver = receipt_machine.node_facts(self._nvml)
            image = {"container": receipt_collect.container(os.environ)}
            self.preflight = receipt_collect.read_preflight(os.environ)
            found |= {
                "source": receipt_collect.source(REPO / "jaxtrain", Path(config_file) if config_file else None, own),
                "versions": driver | {"plugin_built_with": receipt_collect.plugin_versions()} | image,
                "hardware": hardware,
                "preflight": receipt_collect.shorten_preflight(self.preflight),
                "launch": receipt_collect.launch(os.environ),
            }
        if clash := sorted(set(found) & set(fields)):
            raise ValueError(f"the receipt collects {', '.join(clash)} itself. Fix: give these fields other names.")
        found |= fields
        if self._active and self.path.exists():
            found |= self._continue(load(self.path), found)
        self._set(found)

    def _continue(self, before: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the attempts of the existing receipt. Return the fields `attempt` (a number) and `changed` of this attempt.

        `changed` has the differences from the newest attempt that saved a checkpoint, because this attempt resumes from that
        checkpoint. An attempt that ended before its first save has no effect on the result.

        Args:
          before: the existing receipt.
          found: the fields of this attempt.
        """
        every = sorted([*before.pop("attempts"), before], key=lambda one: one["attempt"])
        saved = [one for one in every if one.get("saves") and "source" in one]
        self._earlier = [one if one in saved[-1:] else {k: one[k] for k in SUMMARY if k in one} for one in every]
        here = json.loads(json.dumps(found))  # tuples become lists, as in a file
        changed = differences({**saved[-1], "loaded": None}, here) if saved else []
        at_start = [d for d in changed if not d.name.startswith("GPU ")]  # these are conditions while the earlier attempt ran
        return {"attempt": len(every) + 1, "changed": [(d.group, d.name, d.a, d.b) for d in at_start]}

    def update(self, **fields: Any) -> None:
        """Add fields to the receipt, or replace fields of these names, and write the file."""
        self._set(self.fields | fields)

    def began(self, loaded: Mapping[str, Any] | None) -> None:
        """Write the origin of the first state of this attempt. Later calls (after a rollback) are ignored.

        Args:
          loaded: `from` (path), `step` and `saved_by` (id of the saving attempt) of the loaded checkpoint, and `digest` of its
            tensors. For weights of init.from, `step` and `saved_by` are None. None: the state was made from train.seed.
        """
        if "loaded" not in self.fields:
            savers = {one["id"]: one for one in self._earlier}
            saver = savers.get(loaded["saved_by"], {}) if loaded else {}
            loaded = dict(loaded or SEED)
            self.update(loaded=loaded, origin=saver.get("origin", loaded["digest"]))

    def saved(self, one: Mapping[str, Any]) -> None:
        """Write a durable save as `save`, and the figures of all saves as `saves`. one: a `checkpoint.Saved` as a dict."""
        self._saves.append(one)
        self.update(save=dict(one), saves=receipt_figures.saves(self._saves))

    def finish(self, exit_code: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write the end of the attempt, its figures (speed, memory, loss, goodput), and the GPUs' clocks at the end.

        With `took_no_step`, only a summary of this attempt is written. The last attempt that trained is the top level again.

        Args:
          fields: further fields to write.
        """
        end = {**(fields or {}), "ended": now(), "exit_code": exit_code, "reason": reason}
        trained = [one for one in self._earlier if "source" in one]
        if self.took_no_step and trained:
            self._earlier.remove(trained[-1])
            self._earlier.append({k: v for k, v in (self.fields | end).items() if k in SUMMARY})
            self._set(trained[-1])
            return
        self.update(**end)
        if self._active:  # written separately, since computing the figures may fail
            self.update(**self._final_figures())

    def _final_figures(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        folder = self.path.parent
        try:
            if (folder / "metrics.jsonl").exists():
                out |= receipt_figures.of_run(list(files.read(folder / "metrics.jsonl")), self.fields)
            if "goodput" not in self.fields and (ledger := goodput.read(folder / goodput.FILE)):
                out["goodput"] = goodput.summarise(ledger).record()
            if (hardware := self.fields.get("hardware")) and hardware["gpus"]:
                out["hardware"] = {**hardware, "after": receipt_machine.clocks(self._nvml)}
        # An error, such as a damaged file or a failing driver, must not replace the exit code of the run, which decides whether
        # the run is restarted.
        except Exception as error:
            out["no_figures"] = f"{type(error).__name__}: {error}"
        return out

    def _set(self, fields: Mapping[str, Any]) -> None:
        self.fields = {**fields, "attempts": self._earlier}
        if self._active:
            files.write_atomic(self.path, json.dumps(self.fields, indent=2) + "\n")


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a resolved config (`config.to_dict`), which does not depend on the order of the keys."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
