"""Cached plans on disk, so that each plan is compiled once.

An entry is a plan as gzipped JSON, some 12 KB. Its name is a hash of everything that the plan depends on: the config without
UNRELATED sections, the machine, kernel rates, the ranges of published runs (`published_ranges`), XLA_FLAGS, the compiler's
versions, and the code.
"""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

from jaxtrain.config import installed
from jaxtrain.config.schema import Problem, RunConfig
from jaxtrain.metrics.files import write_atomic
from jaxtrain.plan import FOLDER
from jaxtrain.plan.rates import published_ranges, rates_for
from jaxtrain.plan.result import Plan, Rates, from_json, to_json
from jaxtrain.plan.topology import Topology, layout_of

LOGGER = logging.getLogger("jaxtrain")

# Sections of the config that neither the train step nor its plan reads: places, output, and work between the steps.
UNRELATED = ("checkpoint", "eval", "log", "paths", "profile", "sample")
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "flax", "optax")
USER_CODE_KEYS = ("model.family", "loss.name", "optimizer.name")  # keys whose value may be code of the user


@dataclasses.dataclass(frozen=True)
class Request:
    """A plan to make. `name` and `overrides` label the plan. rates: None for `rates.rates_for`."""

    run: RunConfig
    topology: Topology
    name: str = ""
    overrides: tuple[str, ...] = ()
    rates: Rates | None = None

    def label(self, plan: Plan) -> Plan:
        """Return the plan with this request's label, since a cached plan may have the label of another config."""
        return dataclasses.replace(plan, config=self.name, overrides=self.overrides)


@dataclasses.dataclass(frozen=True)
class PlanOutcome:
    """A plan, or the reason why there is none.

    Attributes:
        kind: planned | cached | refused (the config has `problems`) | failed (planning raised) | crashed | out of memory |
            out of time | stopped.
        problems: of the config, or of the user's own part.
    """

    plan: Plan | None
    kind: str
    reason: str = ""
    problems: tuple[Problem, ...] = ()


class PlanCache:
    """A folder of plans, and of the errors that planning raised."""

    def __init__(self, folder: str | Path = FOLDER):
        self.folder = Path(folder).expanduser()

    def path(self, request: Request, plan_one: str) -> Path:
        """Return the cache file of a request. plan_one: "package.module:function" that makes the plan."""
        run, topology = request.run, request.topology
        user_modules = [value for key, value in run.flat.items() if key in USER_CODE_KEYS and ":" in value]
        facts = {
            "config": relevant_config(run, topology),
            "topology": [topology.name, topology.device_kind, topology.memory_bytes, topology.description],
            "rates": dataclasses.asdict(request.rates or rates_for(topology.gpu, run.precision)),
            "ranges": published_ranges()["ranges"],
            "by": plan_one,
            "versions": installed.versions(PACKAGES),
            "flags": os.environ.get("XLA_FLAGS", ""),
            "code": {name: _digest_of_module(name) for name in ("jaxtrain", *user_modules)},
        }
        return self.folder / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json.gz"

    def get(self, request: Request, plan_one: str) -> PlanOutcome | None:
        """Return the cached outcome of a request, or None. If the file is damaged, log a warning and return None."""
        path = self.path(request, plan_one)
        try:
            tree = json.loads(gzip.decompress(path.read_bytes()))
            if "failure" in tree:
                return PlanOutcome(None, "failed", f"{tree['failure']} (as before; delete {self.folder} to try again)")
            return PlanOutcome(request.label(from_json(tree)), "cached")
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            LOGGER.warning("%s is damaged (%s): it is planned again", path, error or type(error).__name__)
        return None

    def put(self, request: Request, plan_one: str, outcome: PlanOutcome) -> None:
        """Write a plan, or the error that planning raised, atomically. Other outcomes may not recur and are not written.

        If the folder cannot be written, log a warning.
        """
        if outcome.plan is None and outcome.kind != "failed":
            return
        tree = to_json(outcome.plan) if outcome.plan else {"failure": outcome.reason}
        try:
            write_atomic(self.path(request, plan_one), gzip.compress(json.dumps(tree).encode()))
        except OSError as error:
            LOGGER.warning("the plan is not cached: %s", error)


def relevant_config(run: RunConfig, topology: Topology) -> dict[str, Any]:
    """Return config key -> value, without the sections in UNRELATED. Mesh axes have their sizes on this machine."""
    flat = run.flat | {f"mesh.{axis}": size for axis, size in layout_of(run, topology).sizes.items()}
    return {k: v for k, v in flat.items() if k.partition(".")[0] not in UNRELATED}


def _digest_of_module(text: str) -> str:
    """Return a digest of all files of the top-level package of `package.module:name`; `text` itself if it has no files."""
    spec = importlib.util.find_spec(text.partition(":")[0].partition(".")[0])
    if spec is None:
        return text
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.py")) or [Path(spec.origin or "")]
    if not all(file.is_file() for file in files):
        return text
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
