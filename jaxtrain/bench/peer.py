"""The same model and batch in PyTorch, in turns with ours on the same GPU, and the ratio of their speeds.

Before that both take the same steps of a small model of the same kind, from the same weights in float32: where their losses
differ, they do not do the same work, and nothing is compared. What must then agree for the large one: parameters, rotary
frequencies, batch, microbatches, precision and optimizer.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from jaxtrain import flops, hardware, launch
from jaxtrain.bench import report
from jaxtrain.bench.case import FAILED, LATE, OK, apart, last_words
from jaxtrain.bench.case import run as run_program
from jaxtrain.bench.measure import compiled, devices_for, open_rows, rates, spread, start
from jaxtrain.bench.report import Folder
from jaxtrain.config import Problem, RunConfig
from jaxtrain.data import pipeline
from jaxtrain.models.hugging_face import COMMON, HfTensor

SCRIPT = launch.REPO / "benchmarks" / "peer_torch.py"
# One document a row: what PyTorch's causal kernels compute.
SAME_WORK = ("--config.data.packing=none",)
# A model small enough to be sent with its weights. Kinds of layers, rotary scaling and the optimizer stay the config's.
SMALL = (
    *("model.num_layers=2", "model.d_model=64", "model.d_ff=128", "model.vocab_size=272", "data.seq_len=64"),
    *("precision=f32", "train.global_batch=4", "train.grad_accum=2", "mesh.data=1", "mesh.fsdp=1", "remat.policy=none"),
    *("optimizer.lr=0.01", "optimizer.lr_min=0.001", "optimizer.warmup_steps=1"),  # so that an update shows
    *("attention.impl=auto", *(f"dtypes.{name}=f32" for name in ("params", "m", "v", "grads", "reduce"))),
)
# Relative, of losses in float32 after updates: both sum thousands of products in an order of their own.
SAME = 1e-4
CHECKED = 4  # steps of that comparison
TUNE_S = 100.0  # after which the peer tries no further settings


def refusal(base: Sequence[str], count: int, python: str) -> list[Problem]:
    """Why this config, machine or interpreter cannot be compared."""
    run, out = launch.load(base).run, []
    devices = devices_for(count).count
    if devices != 1:
        rule = f"the peer runs on one device, and {devices} would be measured"
        out.append(Problem("--peer", "torch", rule, "Add --devices=1, with a config for one."))
    model = run.model
    plain = {"qkv_bias": False, "qk_norm": False, "sliding_window": 0, "attention_softcap": 0.0, "logit_softcap": 0.0}
    plain |= {"sandwich_norm": False, "attn_logit_scale": 0.0}
    for key, value in plain.items():
        if (given := getattr(model, key)) != value:
            out.append(Problem(f"model.{key}", given, "transformers' Llama has no such thing", f"Set {value}."))
    for key, value, known in (
        ("model.family", model.family, ("llama",)),
        ("loss.name", run.loss.name, ("cross_entropy",)),
        ("optimizer.name", run.optimizer.name, ("adamw",)),
        ("optimizer.groups", run.optimizer.groups, ("",)),
        ("train.freeze", run.train.freeze, ("",)),
        ("lora.rank", run.lora.rank, (0,)),
        ("precision", run.precision, ("bf16", "f32")),
    ):
        if value not in known:
            remedy = f"Set {' or '.join(str(x) or repr(x) for x in known)}."
            out.append(Problem(key, value, "the peer has no such thing", remedy))
    return [*out, *interpreter(python)]


def interpreter(python: str) -> list[Problem]:
    """What is wrong with the peer's interpreter."""
    path = shutil.which(Path(python).expanduser())
    if path is None:
        return [Problem("--peer-python", python, "no such program", "Name a Python that has torch and transformers.")]
    probe = subprocess.run([path, "-c", "import torch, transformers"], capture_output=True, text=True, check=False)
    if not probe.returncode:
        return []
    rule = f"cannot import torch and transformers: {last_words(probe.stderr)}"
    return [Problem("--peer-python", python, rule, "Install them there, or name another interpreter.")]


# ---- what the peer is given


def to_hf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and value of one of our tensors ("layers.0.attention.wq") in transformers."""
    parts = name.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    tensor: HfTensor = COMMON[name if not layer else ".".join(["layers", "{i}", *parts[2:]])]
    ours, theirs = tensor.ours.split(), tensor.theirs.replace("(", "").replace(")", "").split()
    turned = array.transpose([ours.index(axis) for axis in theirs])
    if "(" in tensor.theirs:  # the merged axes stand side by side
        sizes = dict(zip(ours, array.shape, strict=True))
        merged, rest = 1, []
        for group in tensor.theirs.replace("(", "|(").replace(")", ")|").split("|"):
            axes = group.strip(" ()").split()
            if group.strip().startswith("("):
                merged = int(np.prod([sizes[a] for a in axes]))
                rest.append(merged)
            else:
                rest += [sizes[a] for a in axes]
        turned = turned.reshape(rest)
    return tensor.name.replace("{i}", layer), np.ascontiguousarray(turned)


def export_example(ask: dict[str, Any]) -> dict[str, Any]:
    """What the peer must know of a config: `spec`, and in `ask["folder"]` the first batch.

    With `ask["train"]` steps also the initial weights, and the losses of that many steps on this one batch, on the CPU.
    """
    run = launch.load(ask["argv"]).run
    devices = start(run, 1)
    import jax.numpy as jnp

    from jaxtrain.models.attention import rotary_frequencies
    from jaxtrain.optim.optimizer import make_schedule
    from jaxtrain.train import state
    from jaxtrain.train.batch import place_batch
    from jaxtrain.train.program import build

    folder = Path(ask["folder"])
    rows = open_rows(run)
    # Every token counts, as for the peer.
    batch = rows.batch(0) | {"weights": np.ones((run.train.global_batch, run.data.seq_len), np.float32)}
    np.savez(folder / "batch.npz", tokens=batch["tokens"], targets=batch["targets"])
    schedule, o = make_schedule(run.optimizer, run.train.steps), run.optimizer
    spec = {
        "model": dataclasses.asdict(run.model) | {"head_dim": flops.head_dim(run.model)},
        "parameters": flops.parameters(run.model)["total"],
        "rotary_frequencies": [float(f) for f in rotary_frequencies(run.model)],
        "seq_len": run.data.seq_len,
        "global_batch": run.train.global_batch,
        "grad_accum": run.train.grad_accum,
        "precision": run.precision,
        "batch": str(folder / "batch.npz"),
        "weights": "",
        "optimizer": {k: getattr(o, k) for k in ("beta1", "beta2", "eps", "weight_decay", "clip_norm")}
        | {"lr": np.asarray([schedule(jnp.asarray(i)) for i in range(16)]).tolist()},
    }
    losses = []
    if ask["train"]:
        run = pipeline.with_documents(run, rows)
        program = build(run, devices)
        run, program, train, _ = compiled(program, run)
        current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
        arrays: dict[str, Any] = dict(to_hf(name, a) for name, a in state.to_host(current, "params.").items())
        np.savez(folder / "weights.npz", **arrays)
        spec["weights"] = str(folder / "weights.npz")
        for _ in range(ask["train"]):
            current, values = train(current, place_batch(batch, program.batch, program.context))
            losses.append(float(values["loss"]))
    return {"verdict": OK, "spec": spec, "losses": losses}


def theirs(python: str, spec: Mapping[str, Any], log: Path, limit_s: float | None = None) -> dict[str, Any]:
    """The peer's answer, in this time or none."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "spec.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(spec))
        code, said = run_program([python, str(SCRIPT), str(asked), str(answered)], log, limit_s=limit_s)
        if answered.exists():
            return json.loads(answered.read_text())
    if code is None and limit_s:
        return {"verdict": LATE, "why": f"not done after {limit_s:.0f} s"}
    return {"verdict": FAILED, "why": f"exit code {code}: {last_words(said)}"}


def same_work(base: Sequence[str], python: str, folder: Path, log: Path) -> dict[str, Any]:
    """Both train a small model of this kind from the same weights: `verdict`, and the losses of both."""
    heads = launch.load(base).run.model
    grouped = max(1, 4 * heads.num_kv_heads // heads.num_heads)
    small = [*SMALL, "model.num_heads=4", f"model.num_kv_heads={grouped}", "model.head_dim=16"]
    argv = [*base, *(f"--config.{o}" for o in small)]
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    example = apart("example", {"argv": argv, "folder": str(folder), "train": CHECKED}, log=log, environ=_with(on_cpu))
    if example["verdict"] != OK:
        return example
    how = {"platform": "any", "compile": "none", "settings": None, "tune_s": 0.0, "warmup": 1, "steps": CHECKED - 1}
    answer = theirs(python, example["spec"] | how, log.with_name("same_work_torch.txt"))
    if answer["verdict"] != OK:
        return answer
    off = max(abs(a / b - 1) for a, b in zip(answer["losses"], example["losses"], strict=True))
    out = {"ours": example["losses"], "theirs": answer["losses"], "off": off, "allowed": SAME}
    if not off <= SAME:
        return out | {"verdict": FAILED, "why": f"not the same work: losses of a small model differ by {off:.1e}"}
    return out | {"verdict": OK}


def _with(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **more}


# ---- in turns


def run(
    base: Sequence[str],
    name: str,
    python: str,
    rounds: int,
    ask: Mapping[str, Any],
    folder: Folder,
    console: rich.console.Console,
) -> int:
    """Ours, theirs, ours, theirs; prints the ratio. Exit code 0; 1 where either cannot be measured, or they do other work."""
    python = shutil.which(Path(python).expanduser()) or python
    run_config = launch.load(base).run
    platform = hardware.probe().kind
    with tempfile.TemporaryDirectory() as temporary:
        logs = folder.path / "logs" if folder.path else Path(temporary, "logs")
        files = Path(temporary)
        with console.status("the same work? ..."):
            same = same_work(base, python, files, logs / "same_work.txt")
        if same["verdict"] != OK:
            print(same["why"], file=sys.stderr)
            folder.write("Peer", [same["why"]], same_work=same)
            return 1
        report.say(console, f"same work: {CHECKED} losses of a small model agree to {same['off']:.1e} (allowed {SAME:.0e})")
        environ = _with({"JAX_PLATFORMS": "cpu"})
        example = apart("example", {"argv": list(base), "folder": str(files), "train": 0}, environ=environ)
        if example["verdict"] != OK:
            print(example["why"], file=sys.stderr)
            return 1
        how = {"platform": platform, "compile": "best", "settings": None, "tune_s": TUNE_S}
        spec = example["spec"] | how | {key: ask[key] for key in ("warmup", "steps")}
        turns: list[dict[str, Any]] = []
        found = None
        for i in range(rounds):
            for who in ("jaxtrain", "torch"):
                label = f"{who}, round {i + 1}"
                with console.status(f"{label} ..."):
                    if who == "jaxtrain":
                        answer = apart("steps", {**ask, "argv": list(base), "trace": ""}, log=logs / f"{who}_{i + 1}.txt")
                    else:
                        # Its compiling and its search for the best settings are no part of a case's limit.
                        limit_s = ask["limit_s"] and ask["limit_s"] + TUNE_S
                        answer = theirs(python, spec, logs / f"{who}_{i + 1}.txt", limit_s)
                        answer = _as_ours(answer, run_config)
                        spec["settings"] = answer.get("settings")  # chosen once
                turns.append({"who": who, "name": label, **answer})
                cells = report.step_row(label, answer)
                report.say(console, f"{label}: {cells[1]} s" if answer["verdict"] == OK else f"{label}: {cells[-1]}")
                found = compared(turns)
                folder.write("Peer", page(name, turns, found, same), same_work=same, turns=turns, compared=found)
                if answer["verdict"] != OK:
                    print(f"{label}: {answer['verdict']}: {answer['why']}", file=sys.stderr)
                    return 1
    report.show(console, "", report.STEP_HEADINGS, [report.step_row(t["name"], t) for t in turns])
    for line in sentences(turns, found):
        report.say(console, line, "bold" if line.startswith("ratio") else "")
    if platform == "cpu":
        report.say(console, report.NO_MEASUREMENT, "dim")
    return 0


def _as_ours(answer: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """The peer's answer in the terms of ours: rates of its step, by the same count of FLOPs."""
    if answer["verdict"] != OK:
        return answer
    gpu = hardware.lookup(answer["device"])
    peak = run.log.peak_tflops or (gpu.peak(run.compute) if gpu else None)
    seconds = answer.pop("seconds")
    counted, step_s = len(seconds), spread(seconds)
    out = rates(run, 1, step_s["median"], peak)
    # What the peer computes again is not what our remat policy does.
    out["hfu"] = None if answer["settings"]["checkpoint"] else out["mfu_causal"]
    memory = {"peak_gib": answer.pop("reserved_gib"), "compiled_gib": None, "budget_gib": None}
    losses = answer.pop("losses")
    steps = {
        "steps": counted,
        "warmup": len(losses) - counted,
        "compile_s": None,
        "planned": None,
        "not_planned": "",
        "memory": memory,
    }
    return answer | out | steps | {"step_s": step_s, "loss": {"first": losses[0], "last": losses[-1]}}


def compared(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Ours over theirs in tokens per second: of the medians of all rounds, and of each round. None before the first pair."""
    speed = {who: [t["tokens_per_s"] for t in turns if t["who"] == who and t["verdict"] == OK] for who in ("jaxtrain", "torch")}
    pairs = [a / b for a, b in zip(*speed.values(), strict=False)]
    if not pairs:
        return None
    ours, other = (statistics.median(v) for v in speed.values())
    return {"ratio": ours / other, "least": min(pairs), "most": max(pairs), "rounds": len(pairs)}


def sentences(turns: Sequence[Mapping[str, Any]], found: Mapping[str, Any] | None) -> list[str]:
    """The result in words, with the peer's settings."""
    peers = [t for t in turns if t["who"] == "torch" and t["verdict"] == OK]
    if not peers or found is None:
        return []
    p, out = peers[0], []
    s = p["settings"]
    out.append(
        f"torch {p['torch']}, transformers {p['transformers']}: torch.compile of {s['compile']}, SDPA {s['attention']}, "
        f"activation checkpointing {'of every layer' if s['checkpoint'] else 'off'}, fused AdamW, autocast over float32"
    )
    if p.get("dynamo"):
        out.append(f"  torch.compile: {', '.join(f'{count} {what}' for what, count in p['dynamo'].items())}")
    for t in p["tried"]:
        seen = f"{t['step_s']:.4g} s" if t["step_s"] else t["why"]
        again = ", checkpointing" if t["checkpoint"] else ""
        out.append(f"  tried: SDPA {t['attention']}, compile {t['compile']}{again}: {seen}")
    out.append(f"ratio ours/theirs in tokens/s: {found['ratio']:.3f} (rounds {found['least']:.3f} to {found['most']:.3f})")
    return out


def page(name: str, turns: Sequence[Mapping[str, Any]], found: Mapping[str, Any] | None, same: Mapping[str, Any]) -> list[str]:
    """results.md."""
    rows = [report.step_row(t["name"], t) for t in turns]
    lines = report.markdown(f"{name} against PyTorch", report.STEP_HEADINGS, rows)
    lines += [f"{CHECKED} losses of a small model in float32 agree to {same['off']:.1e} (allowed {SAME:.0e}).", ""]
    return [*lines, *(f"- {line.strip()}" for line in sentences(turns, found)), ""]
