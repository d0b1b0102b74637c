"""Config and environment of two runs: what differs, less what explains nothing (resume.TABLE, and the tables below)."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.config import RunConfig, flatten, to_dict
from jaxtrain.environment import HARMLESS
from jaxtrain.hardware import NCCL_ALGO
from jaxtrain.receipt.result import Difference, differing
from jaxtrain.resume import NOTHING, effect

# MFU is counted by this key, so it is compared although it has no effect. Keys that take only time are compared too. The
# variables that env.* set are compared instead of env.* itself.
STATED = ("log.peak_tflops",)
FILES = ("data.source", "data.tokenizer")  # paths: compared by what the files hold, where both receipts tell
HELD_OUT = ("data.eval_source",)

# A key that one of two configs does not have yet, or no more: what its jaxtrain did is taken to be today's default.
DEFAULTS = dict(flatten(to_dict(RunConfig())))

# Variables of the same kind, besides environment.HARMLESS.
NO_EFFECT_VARIABLES = {
    "JAXTRAIN_*": "between run.sh and the run; the image is compared as a version",
    "SLURM_*": "numbers of the job; nodes and devices are compared as hardware",
    "JAX_COMPILATION_CACHE_DIR": "where files lie",
    "XLA_CLIENT_MEM_FRACTION": "train.memory_fraction decides it",
    "CUDA_DEVICE_ORDER": "the numbers of the GPUs",
}
# Flags within XLA_FLAGS likewise.
NO_EFFECT_FLAGS = {"--xla_force_host_platform_device_count": "how many devices there are is compared as hardware"}
# Variable and value -> the key that sets it: where that differs, the variable follows.
FOLLOWS = {("NCCL_ALGO", NCCL_ALGO): "train.deterministic"}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def counts(key: str) -> bool:
    """Whether a key can explain anything."""
    return key in STATED or effect(key) != NOTHING


def config(a: Mapping[str, Any], b: Mapping[str, Any], mesh_a: Any, mesh_b: Any, by_content: Iterable[str]) -> list[Difference]:
    """Of two resolved configs. mesh_a, mesh_b: the sizes that came of the mesh; None where that is not known.

    by_content: keys that the data's fingerprint tells better.
    """
    told = set(by_content)
    if mesh_a is not None and mesh_b is not None:
        a, b = ({**side, "mesh": sizes_asked(side, mesh_a, mesh_b)} for side in (a, b))
    whole = (DEFAULTS | dict(flatten(side)) for side in (a, b))
    flat_a, flat_b = ({k: v for k, v in side.items() if counts(k) and k not in told} for side in whole)
    return differing("config", flat_a, flat_b)


def sizes_asked(resolved: Mapping[str, Any], mesh_a: Mapping[str, int], mesh_b: Mapping[str, int]) -> dict[str, int]:
    """The mesh of a config, without the axes whose sizes came out the same: -1 is whatever is left."""
    return {axis: size for axis, size in resolved.get("mesh", {}).items() if mesh_a.get(axis) != mesh_b.get(axis)}


def variables(attempt: Mapping[str, Any]) -> dict[str, str]:
    """The environment of an attempt as it stood: XLA_FLAGS flag by flag, and without what explains nothing."""
    env = attempt.get("env") or {}
    found = {**attempt.get("environment", {}), **env.get("inherited", {}), **env.get("set", {})}
    flags = found.pop("XLA_FLAGS", "").split()
    kept = {n: v for n, v in sorted(found.items()) if not matches(n, (*HARMLESS, *NO_EFFECT_VARIABLES))}
    for flag in flags:
        name, _, value = flag.partition("=")
        if name not in NO_EFFECT_FLAGS:
            kept[f"XLA_FLAGS {name}"] = value or "true"
    return kept


def environment(a: Mapping[str, Any], b: Mapping[str, Any], changed: Iterable[str]) -> list[Difference]:
    """Of two attempts. changed: the keys of the config that differ."""
    changed = set(changed)
    found = differing("environment", variables(a), variables(b))
    return [d for d in found if not any(FOLLOWS.get((d.name, value)) in changed for value in (d.a, d.b))]
