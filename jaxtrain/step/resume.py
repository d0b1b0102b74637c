"""A comparison of the configs of a checkpoint and of the run that resumes from it.

Each key's declaration says whether it may change (`schema.resume_of`); `compare_configs` has the rules that depend on values.
Imports no jax, and reads no file.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxtrain.config import schema
from jaxtrain.config.declaration import Resume
from jaxtrain.config.schema import Problem, resume_of
from jaxtrain.optim import groups

EXPERT_LOSSES = ("balance_loss", "sequence_balance_loss", "z_loss")  # each is computed for a microbatch
# Keys that decide which tokens are on a device at one time.
DECIDES_DROPS = ("mesh.*", "sharding.rules.*", "train.grad_accum", "parallel.context")


def compare_configs(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    allow_change: str = "",
    contents: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> tuple[list[str], list[Problem]]:
    """Return notes on allowed changes, and problems of changes that are not allowed.

    Args:
      old: nested config of the checkpoint. A key that an older version did not have counts as its present default.
      new: nested config of this run. Both are results of `config.to_dict`.
      allow_change: the value of checkpoint.allow_change.
      contents: key of a path -> hashes of its content in the checkpoint and now. They decide whether the key has changed. A
        key without hashes is compared by its text.
    """
    old_run, unknown = schema.resolve(old)
    before = old_run.flat
    after = dict(schema.flatten(new))
    allowed = [name.strip() for name in allow_change.split(",") if name.strip()]
    problems = check_allow_change(allow_change)
    notes: list[str] = []
    stored = dict(schema.flatten(old))
    removed = [p.key for p in unknown if p.rule == schema.NO_KEY]
    dropped = {k: v for k, v in stored.items() if any(f"{k}.".startswith(f"{name}.") for name in removed)}
    problems += [
        dataclasses.replace(p, rule=f"in the checkpoint's config, {p.rule}") for p in unknown if p.rule != schema.NO_KEY
    ]
    if dropped:
        notes.append(f"in the checkpoint's config, no longer keys: {', '.join(f'{k} = {v!r}' for k, v in dropped.items())}")
    needs_approval: list[tuple[str, Resume]] = []
    for name in [*after, *(k for k in before if k not in after)]:
        changed, (old_hash, new_hash) = before.get(name) != after.get(name), contents.get(name, ("", ""))
        if old_hash and old_hash == new_hash:
            notes += [
                f"{name}: {_format(name, before)} -> {_format(name, after)} (the same content in another place)"
            ] * changed
            continue
        if not changed and old_hash == new_hash:
            continue
        if name == "model.head_dim" and _width_of_heads(before) == before[name] and _width_of_heads(after) == after[name]:
            continue  # follows from another key, which is reported
        if name == "lora.targets" and not (before["lora.rank"] and after["lora.rank"]):
            continue  # not read, or lora.rank is reported
        change = (
            f"{_format(name, before)} -> {_format(name, after)}" if changed else f"{_format(name, after)} has other content"
        )
        rule = resume_of(name)
        if name == groups.KEY and groups.optimizer_overrides(before[name]) != groups.optimizer_overrides(after[name]):
            rule = Resume("never", "parameters that change their optimizer store other tensors")
        if name == "model.attention_pattern" and _delta_net_layers(old_run) != _delta_net_layers(schema.resolve(new)[0]):
            rule = Resume("never", "delta nets and softmax attention have other weights")
        if name in ("dtypes.m", "dtypes.v") and "int8" in (before[name], after[name]):
            rule = Resume("never", "8-bit blocks are other tensors, and moments are not converted to them or from them")
        if name == "train.grad_accum" and old_run.model.num_experts and any(after[f"moe.{loss}"] for loss in EXPERT_LOSSES):
            rule = Resume("ask", "moe.balance_loss and moe.z_loss are computed per microbatch, and sum to other values")
        if name == "data.max_segments" and {before[name], after[name]} == {0, schema.MOST_DOCUMENTS}:
            rule = Resume("free", "the same sequences")
        if rule.word == "free" and _decides_drops(name, before, after):
            rule = Resume("ask", "with moe.capacity_factor above 0, experts drop other tokens")
        if rule.word == "free" or (rule.word == "ask" and name in _match_keys(allowed, [name])):
            notes.append(f"{name}: {change} ({rule.reason})")
        elif rule.word == "ask":
            needs_approval.append((name, rule))
        else:
            formerly = f"was {_format(name, before)} in the checkpoint and can never change on resume: {rule.reason}"
            remedy = "Set it back, or start a new run in another --workdir"
            if not name.startswith("model."):  # other weights do not fit
                remedy += " (--config.init.from starts it from these weights)"
            problems.append(Problem(name, after.get(name), formerly, remedy))
    settings = [name for name in {**before, **after} if name.startswith(f"{schema.OWN}.")]
    for name in allowed:
        if name.startswith(f"{schema.OWN}.") and not _match_keys([name], settings):
            rule = "neither the checkpoint's config nor this one has such a key"
            remedy = schema.suggest(name, settings) if settings else "Take it out of the list"
            problems.append(Problem("checkpoint.allow_change", name, rule, remedy))
    allowed = [name for name in allowed if _match_keys([name], [*settings, *schema.all_keys()])]
    everything = ",".join(dict.fromkeys([*allowed, *(name for name, _ in needs_approval)]))
    for name, rule in needs_approval:
        former = f"was {_format(name, before)}" if before.get(name) != after.get(name) else "had other content"
        problems.append(
            Problem(
                name,
                after.get(name),
                f"{former} in the checkpoint: {rule.reason}",
                f"Set it back, or allow it: --config.checkpoint.allow_change={everything}",
            )
        )
    return notes, problems


def check_trained(meta: Mapping[str, Any], folder: str) -> list[Problem]:
    """Return a problem if a checkpoint is an imported or averaged model, or imported adapters: it has no optimizer state.

    meta: meta.json of the checkpoint. folder: the folder of the run or of its checkpoints.
    """
    if not {"hugging_face", "peft", "averaged"} & meta.keys():
        return []
    rule = f"holds an {'averaged' if 'averaged' in meta else 'imported'} model, which is no run to resume"
    return [Problem("--workdir", folder, rule, f"Name another folder, with --config.init.from={folder}")]


def _delta_net_layers(run: schema.RunConfig) -> list[int]:
    return [i for i, kind in enumerate(run.model.kinds) if kind == schema.DELTA]


def _width_of_heads(values: Mapping[str, Any]) -> float:
    return values["model.d_model"] / values["model.num_heads"]


def _decides_drops(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a key decides which tokens are on a device, and so which tokens are above the capacity of experts.

    If mesh.seq shards sequences, parallel.context decides which tokens of a sequence are on a device.
    """
    if not (after["model.num_experts"] and after["moe.capacity_factor"]):
        return False
    if name.startswith("parallel.") and before["mesh.seq"] == after["mesh.seq"] == 1:
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DECIDES_DROPS)


def check_allow_change(allow_change: str) -> list[Problem]:
    """Return the problems of checkpoint.allow_change itself: unknown names, and patterns that match only fixed keys.

    Fixed keys are the keys that can never change on resume.

    A pattern that also matches other keys is valid, although `compare_configs` refuses all changes of the fixed keys."""
    keys = list(schema.all_keys())
    problems: list[Problem] = []
    for name in filter(None, (pattern.strip() for pattern in allow_change.split(","))):
        matched = [name] if name.startswith(f"{schema.OWN}.") else _match_keys([name], keys)
        fixed = [k for k in matched if resume_of(k).word == "never"]
        if not matched:
            problems.append(Problem("checkpoint.allow_change", name, schema.NO_KEY, schema.suggest(name, keys)))
        elif fixed == matched:
            problems.append(
                Problem("checkpoint.allow_change", name, f"{fixed[0]} can never change on resume", "Take it out of the list")
            )
    return problems


def _match_keys(patterns: list[str], keys: list[str]) -> list[str]:
    return [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]


def _format(name: str, values: Mapping[str, Any]) -> str:
    return repr(values[name]) if name in values else "not set"


def markdown() -> str:
    """Return the tables of docs/checkpoints.md: one for each word, keys of one reason in one row.

    A section stands for its keys, if no key of it has another row.
    """
    headings = {
        "free": "Freely, with a note in the log",
        "ask": "Only if named in `--config.checkpoint.allow_change=KEY,KEY`",
        "never": "Never",
    }
    rules = {name: resume_of(name) for name in (*schema.all_keys(), f"{schema.OWN}.*")}
    rows: dict[Resume, list[str]] = {}
    for name, rule in rules.items():
        section = name.partition(".")[0]
        covers_section = section != name and {r for k, r in rules.items() if k.startswith(f"{section}.")} == {rule}
        rows.setdefault(rule, []).append(f"`{section}.*`" if covers_section else f"`{name}`")
    lines: list[str] = []
    for word, heading in headings.items():
        lines += [f"**{heading}:**", "", "| keys | reason |", "|---|---|"]
        lines += [f"| {', '.join(dict.fromkeys(keys))} | {rule.reason} |" for rule, keys in rows.items() if rule.word == word]
        lines.append("")
    return "\n".join(lines).rstrip()
