"""The table of keys that a resumed run may change, with the effect of each change, and a comparison of two configs.

Imports no jax, and reads no file. `receipt`, `parity` and the cache of `plan` read the table too.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxtrain.config import schema
from jaxtrain.config.schema import Problem
from jaxtrain.optim import groups

# Effects of a change on training, in ascending order.
NOTHING = "nothing"  # neither losses nor speed
TIME = "time"  # work between the steps: no training loss changes
INPUTS = "inputs"  # the same program computes other numbers
MACHINE = "machine"  # the same step by other kernels, or with other memory: losses differ by rounding
LAYOUT = "layout"  # the same step in another layout or order: losses differ by rounding
FUNCTION = "function"  # another step


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule for changes on resume, and the keys to which it applies."""

    keys: tuple[str, ...]  # dotted, with * for any part
    change: str  # free | ask | never
    reason: str
    effect: str = FUNCTION


# free: changes place, speed, length or output of the run, or is often changed on purpose; noted at start. ask: changes the
# training, and could be an unnoticed edit of a config file; must be named in checkpoint.allow_change. never: the tensors or the
# meaning of token ids would not fit.
TABLE = (
    Row(
        ("mesh.*", "sharding.*"),
        "free",
        "placement: values differ by rounding. With moe.capacity_factor above 0, mesh.* and sharding.rules.* decide which "
        "tokens experts drop: then only if named in checkpoint.allow_change",
        LAYOUT,
    ),
    Row(
        ("attention.impl", "parallel.*", "remat.*", "compiler.*", "pipeline.*"),
        "free",
        "the same step up to rounding. With moe.capacity_factor and mesh.seq, parallel.context decides which tokens "
        "experts drop: then only if named in checkpoint.allow_change",
        LAYOUT,
    ),
    Row(("moe.impl",), "free", "the same step up to rounding", LAYOUT),
    Row(("train.accumulate", "loss.chunk"), "free", "the same step up to rounding", LAYOUT),
    Row(("train.memory_fraction",), "free", "the same step up to rounding", MACHINE),
    Row(
        ("train.grad_accum",),
        "free",
        "the same step up to rounding. moe.balance_loss, moe.z_loss and moe.capacity_factor apply to a microbatch: with them "
        "only if named in checkpoint.allow_change",
        LAYOUT,
    ),
    Row(("train.max_minutes", "train.timeouts", "train.epochs"), "free", "training does not depend on it", NOTHING),
    Row(("train.sdc_check_every",), "free", "training does not depend on it", TIME),
    Row(
        ("train.on_divergence", "train.max_skipped_steps"),
        "free",
        "decides only whether a run stops or rolls back after skipped steps",
        INPUTS,
    ),
    Row(("train.loss_spike_sigma",), "free", "applies to later steps; checkpoints have the earlier losses in any case"),
    Row(("env.*",), "free", "NCCL's algorithms add in different orders: values differ by rounding", NOTHING),
    Row(("train.deterministic",), "free", "other kernels: values differ by rounding", MACHINE),
    Row(
        ("train.steps",),
        "free",
        "a run may become longer or shorter; with optimizer.decay_steps=0 the schedule then ends at the new last step",
    ),
    Row(
        ("optimizer.lr", "optimizer.lr_min", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps"),
        "free",
        "the learning rate is a function of the step alone",
    ),
    Row(
        ("data.source", "data.source_schedule"),
        "free",
        "each source continues at its position, and a new one begins",
        INPUTS,
    ),
    Row(("data.eval_source", "eval.*"), "free", "training does not depend on it", TIME),
    Row(
        (
            *("log.*", "paths.*", "checkpoint.dir", "checkpoint.allow_change"),
            "profile.dump_hlo",
        ),
        "free",
        "training does not depend on it",
        NOTHING,
    ),
    Row(
        ("sample.*", "profile.start", "profile.steps", "checkpoint.every_steps", "checkpoint.step", "checkpoint.keep*"),
        "free",
        "training does not depend on it",
        TIME,
    ),
    Row(
        ("train.seed",),
        "free",
        "used only at a run's start; with dtypes.params=bf16 also to round updates",
        INPUTS,
    ),
    Row(("model.init_std",), "free", "used only at a run's start"),
    Row(
        ("init.*",),
        "free",
        "used only at a run's start; with adapters, the path of their base, whose weights must be the same",
        INPUTS,
    ),
    Row(
        ("data.seq_len", "train.global_batch"),
        "ask",
        "the data position counts sequences of this length in batches of this size",
    ),
    Row(("data.seed",), "ask", "another order of the data: some sequences repeat, some are never used", INPUTS),
    Row(("data.packing", "data.max_segments"), "ask", "other sequences: some text repeats, some is never used"),
    Row(
        ("data.tokenizer",),
        "ask",
        "token ids must mean the same tokens. The same tokenizer in another place needs no permission",
        INPUTS,
    ),
    Row(("loss.name", "loss.z_loss", "loss.beta", "loss.label_smoothing"), "ask", "losses before and after do not compare"),
    Row(("loss.mtp_weight",), "ask", "part of the recipe"),
    Row(("own.*",), "ask", "your own model family, loss, optimizer or data source reads it"),
    Row(
        ("moe.capacity_factor", "moe.balance_loss", "moe.sequence_balance_loss", "moe.z_loss", "moe.bias_rate"),
        "ask",
        "part of the recipe",
    ),
    Row(("model.rope_*", "model.local_rope_base"), "ask", "positions have another meaning; use it to stretch the context"),
    Row(
        (
            "model.sliding_window",
            "model.attention_pattern",
            "model.attention_softcap",
            "model.logit_softcap",
            "model.attn_logit_scale",
            "model.norm_eps",
            "model.experts_per_token",
            "model.router",
            "model.renormalize",
            "model.routed_scaling",
            "model.router_groups",
            "model.groups_per_token",
        ),
        "ask",
        "the same weights compute another function",
    ),
    Row(("precision", "fp8.*", "attention.forward", "dtypes.*"), "ask", "rounding changes; stored tensors are converted"),
    Row(
        ("optimizer.momentum", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        "ask",
        "the stored moments were averaged with the old values",
    ),
    Row(
        ("optimizer.weight_decay", "optimizer.clip_norm", "optimizer.groups"),
        "ask",
        "part of the recipe",
    ),
    Row(("optimizer.offload",), "free", "the same step up to rounding", MACHINE),
    Row(("optimizer.name",), "never", "another optimizer stores other tensors"),
    Row(("lora.alpha",), "ask", "the same weights compute another function"),
    Row(("lora.rank", "lora.targets", "train.freeze"), "never", "other tensors are trained and have moments"),
    Row(
        (
            "model.family",
            "model.num_layers",
            "model.d_model",
            "model.num_heads",
            "model.num_kv_heads",
            "model.head_dim",
            "model.d_ff",
            "model.num_experts",
        ),
        "never",
        "other tensors, or another meaning of the same tensors",
    ),
    Row(
        (
            *("model.tied_head", "model.qk_norm", "model.qkv_bias", "model.sandwich_norm"),
            *("model.attention_out_bias", "model.attention_sinks"),
            *("model.router_bias", "model.router_logit_bias", "model.expert_bias"),
            *("model.shared_d_ff", "model.dense_layers", "model.dense_d_ff", "model.mtp_layers"),
            *("model.kv_lora_rank", "model.q_lora_rank", "model.v_head_dim"),
            *("model.qk_nope_head_dim", "model.qk_rope_head_dim"),
        ),
        "never",
        "adds or removes tensors, or changes their shapes",
    ),
    Row(("model.vocab_size",), "never", "adds or removes tensors, or changes their shapes"),
)

EXPERT_LOSSES = ("balance_loss", "sequence_balance_loss", "z_loss")  # each is computed for a microbatch
# Keys that decide which tokens are on a device at one time.
DECIDES_DROPS = ("mesh.*", "sharding.rules.*", "train.grad_accum", "parallel.context")


def rows_for(key: str) -> list[Row]:
    """Return the rows for a key: exactly one for every key of the config."""
    return [row for row in TABLE if any(fnmatch.fnmatchcase(key, pattern) for pattern in row.keys)]


def effect(key: str) -> str:
    """Return the effect of a change of a dotted key, such as TIME; FUNCTION for a key that the table does not have."""
    return next((row.effect for row in rows_for(key)), FUNCTION)


def compare(
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
    was, unknown = schema.resolve(old)
    before = dict(schema.flatten(schema.to_dict(was)))
    after = dict(schema.flatten(new))
    allowed = [name.strip() for name in allow_change.split(",") if name.strip()]
    problems = check_allow_change(allow_change)
    notes: list[str] = []
    for p in unknown:
        if p.key in before:
            problems.append(dataclasses.replace(p, rule=f"in the checkpoint's config, {p.rule}"))
        else:
            notes.append(f"{p.key}: in the checkpoint's config, no longer a key")
    asked: list[tuple[str, str, Row]] = []
    for name in [*after, *(k for k in before if k not in after)]:
        moved, (was_in, is_in) = before.get(name) != after.get(name), contents.get(name, ("", ""))
        if was_in and was_in == is_in:
            notes += [f"{name}: {_shown(name, before)} -> {_shown(name, after)} (the same content in another place)"] * moved
            continue
        if not moved and was_in == is_in:
            continue
        if name == "model.head_dim" and _width_of_heads(before) == before[name] and _width_of_heads(after) == after[name]:
            continue  # follows from another key, which is reported
        if name == "lora.targets" and not (before["lora.rank"] and after["lora.rank"]):
            continue  # not read, or lora.rank is reported
        change = f"{_shown(name, before)} -> {_shown(name, after)}" if moved else f"{_shown(name, after)} has other content"
        row = rows_for(name)[0]
        if name == groups.KEY and groups.moved(before[name]) != groups.moved(after[name]):
            row = dataclasses.replace(row, change="never", reason="parameters that change their optimizer store other tensors")
        if name == "train.grad_accum" and was.model.num_experts and any(after[f"moe.{loss}"] for loss in EXPERT_LOSSES):
            reason = "moe.balance_loss and moe.z_loss are computed per microbatch, and sum to other values"
            row = dataclasses.replace(row, change="ask", reason=reason)
        if name == "data.max_segments" and {before[name], after[name]} == {0, schema.MOST_DOCUMENTS}:
            row = dataclasses.replace(row, change="free", reason="the same sequences")
        if row.change == "free" and _decides_drops(name, before, after):
            row = dataclasses.replace(row, change="ask", reason="with moe.capacity_factor above 0, experts drop other tokens")
        if row.change == "free" or (row.change == "ask" and name in _matching(allowed, [name])):
            notes.append(f"{name}: {change} ({row.reason})")
        elif row.change == "ask":
            asked.append((name, change, row))
        else:
            problems.append(
                Problem(
                    name,
                    after.get(name),
                    f"was {_shown(name, before)} in the checkpoint and can never change on resume: {row.reason}",
                    "Set it back, or start a new run in another --workdir (--config.init.from starts it from these weights)",
                )
            )
    settings = [name for name in {**before, **after} if name.startswith(f"{schema.OWN}.")]
    for name in allowed:
        if name.startswith(f"{schema.OWN}.") and not _matching([name], settings):
            rule = "neither the checkpoint's config nor this one has such a key"
            remedy = schema.nearest(name, settings) if settings else "Take it out of the list"
            problems.append(Problem("checkpoint.allow_change", name, rule, remedy))
    allowed = [name for name in allowed if _matching([name], [*settings, *schema.declared()])]
    everything = ",".join(dict.fromkeys([*allowed, *(name for name, _, _ in asked)]))
    for name, _, row in asked:
        former = f"was {_shown(name, before)}" if before.get(name) != after.get(name) else "had other content"
        problems.append(
            Problem(
                name,
                after.get(name),
                f"{former} in the checkpoint: {row.reason}",
                f"Set it back, or allow it: --config.checkpoint.allow_change={everything}",
            )
        )
    return notes, problems


def check_trained(meta: Mapping[str, Any], folder: str) -> list[Problem]:
    """Return a problem if a checkpoint is an imported model, or imported adapters: it has no optimizer state.

    meta: meta.json of the checkpoint. folder: the folder of the run or of its checkpoints.
    """
    if not {"hugging_face", "peft"} & meta.keys():
        return []
    rule = "holds an imported model, which is no run to resume"
    return [Problem("--workdir", folder, rule, f"Name another folder, with --config.init.from={folder}")]


def _width_of_heads(values: Mapping[str, Any]) -> float:
    return values["model.d_model"] / values["model.num_heads"]


def _decides_drops(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a key decides which tokens are on a device, and so which tokens are above the capacity of experts.

    If mesh.seq shards sequences, parallel.context decides which tokens of a sequence are on a device.
    """
    if not (after["model.num_experts"] and after["moe.capacity_factor"]):
        return False
    if name.startswith(("attention.", "parallel.")) and before["mesh.seq"] == after["mesh.seq"] == 1:
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DECIDES_DROPS)


def check_allow_change(allow_change: str) -> list[Problem]:
    """Return the problems of checkpoint.allow_change itself: unknown names, and patterns that match only fixed keys.

    Fixed keys are the keys that can never change on resume.

    A pattern that also matches other keys is valid, although `compare` refuses all changes of the fixed keys."""
    known = list(schema.declared())
    problems: list[Problem] = []
    for name in filter(None, (part.strip() for part in allow_change.split(","))):
        matched = [name] if name.startswith(f"{schema.OWN}.") else _matching([name], known)
        never = [k for k in matched if rows_for(k)[0].change == "never"]
        if not matched:
            problems.append(Problem("checkpoint.allow_change", name, schema.NO_KEY, schema.nearest(name, known)))
        elif never == matched:
            problems.append(
                Problem("checkpoint.allow_change", name, f"{never[0]} can never change on resume", "Take it out of the list")
            )
    return problems


def _matching(patterns: list[str], keys: list[str]) -> list[str]:
    return [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]


def _shown(name: str, values: Mapping[str, Any]) -> str:
    return repr(values[name]) if name in values else "not set"


def markdown() -> str:
    """Return the tables as docs/checkpoints.md shows them: one for each kind of change, keys of one reason in one row."""
    headings = {
        "free": "Freely, with a note in the log",
        "ask": "Only if named in `--config.checkpoint.allow_change=KEY,KEY`",
        "never": "Never",
    }
    lines: list[str] = []
    for change, heading in headings.items():
        keys: dict[str, list[str]] = {}
        for row in (row for row in TABLE if row.change == change):
            keys.setdefault(row.reason, []).extend(f"`{key}`" for key in row.keys)
        lines += [f"**{heading}:**", "", "| keys | reason |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in keys.items()] + [""]
    return "\n".join(lines).rstrip()
