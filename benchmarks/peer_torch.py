"""Time the same model and batch in PyTorch and in jaxtrain, alternately on one GPU, and compare their speeds.

    python -m benchmarks.peer_torch --config=configs/llama3_8b.py:half --python=~/torch/bin/python

First, PyTorch and jaxtrain train a small model of the config's family, from the same float32 weights. If the losses differ by
more than SAME, the command fails and times nothing. For the config's model, PyTorch's step takes rotary frequencies, batch,
microbatches, precision and optimizer from jaxtrain. The numbers of parameters must be equal. benchmarks/peer_torch_step.py has
the step in PyTorch.
"""

import dataclasses
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, launch
from jaxtrain.config.command_line import Args, Invalid, Parser, at_least, make_console, output_file
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.data import loading
from jaxtrain.data.batches import resolve_max_segments
from jaxtrain.models import flops
from jaxtrain.node import train_step
from jaxtrain.node.train_step import DATA
from jaxtrain.report import bench
from jaxtrain.report.bench import BenchFolder
from jaxtrain.step.validate_places import check_writable
from jaxtrain.train import step_log
from jaxtrain.train.child import FAILED, OK, last_lines, run_case

SCRIPT = launch.REPO / "benchmarks" / "peer_torch_step.py"
EXPORT = "benchmarks.peer_torch:export_example"
# One document per sequence, since PyTorch's causal kernels do not support packing.
SAME_WORK = ("--config.data.packing=none",)
# A small model, whose weights can be passed in a file. Kinds of layers, rotary scaling and optimizer are those of the config.
SMALL = (
    *("model.num_layers=2", "model.d_model=64", "model.d_ff=128", "model.vocab_size=272", "data.seq_len=64"),
    *("precision=f32", "train.global_batch=4", "train.grad_accum=2", "mesh.data=1", "mesh.fsdp=1", "remat.policy=none"),
    *("optimizer.lr=0.01", "optimizer.lr_min=0.001", "optimizer.warmup_steps=1"),  # large, so that updates change the loss
    *("attention.impl=auto", *(f"dtypes.{name}=f32" for name in ("params", "m", "v", "grads", "reduce"))),
)
# Tolerated relative difference of losses in float32 after updates, since the order of sums differs.
SAME = 1e-4
CHECKED = 4  # steps of the comparison of losses
ATTENTION, COMPILE = ("cudnn", "flash", "sdpa"), ("layers", "model", "none")  # sdpa: PyTorch chooses the kernel
# Settings of PyTorch's step, by their name in --settings.
SETTINGS = {
    f"{a},{c}{',checkpoint' if again else ''}": {"attention": a, "compile": c, "checkpoint": again}
    for a, c, again in itertools.product(ATTENTION, COMPILE, (False, True))
}


def read_settings(text: str) -> list[dict[str, Any]]:
    """Return the settings of a valid value of --settings, in the order in which they are tried."""
    return [SETTINGS[name.strip()] for name in text.split(";")]


def check_settings(text: str) -> str:
    """Return a value of --settings, if all its names are known."""
    if all(name.strip() in SETTINGS for name in text.split(";")):
        return text
    rule = f"must be ATTENTION,COMPILE[,checkpoint] of {'|'.join(ATTENTION)} and {'|'.join(COMPILE)}; several, separated by ;"
    raise Invalid(rule)


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser(
        "benchmarks.peer_torch",
        "Time the same model and batch in PyTorch and here, alternately on one GPU.",
        config=True,
        notes="Exit codes: 0 measured; 1 one of the two could not be measured, or they do different work; 2 the "
        "command or config "
        "is wrong, nothing was started; 130 Ctrl-C.",
    )
    p.option("python", "a Python with torch and transformers; default: this one", "PATH")
    p.option("rounds", "how often each of the two is measured; default 2", "N", 2, type=at_least(1))
    p.option("steps", "timed steps; default 20", "N", 20, type=at_least(1))
    p.option("warmup", "steps before them; default 5", "N", 5, type=at_least(1))
    p.option(
        "settings",
        "PyTorch's settings, without a search; several, separated by ;, are tried in order until one works",
        "ATTENTION,COMPILE[,checkpoint]",
        type=check_settings,
        example="cudnn,layers",
    )
    p.option(
        "tune",
        "seconds after which PyTorch tries no further settings; default 100. 0: the first that works",
        "S",
        100,
        type=at_least(0),
    )
    p.option(
        "limit",
        "seconds of the comparison of losses, and of each measurement; --tune more for a search. 0: no limit",
        "S",
        0,
        type=at_least(0),
    )
    p.option("json", "all results, for programs", "FILE", type=output_file)
    p.option("out", "results.md, results.json, receipt.json and the output of every round", "DIR")
    return p


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(parser(), argv, start)


def start(args: Args) -> int:
    """Start the comparison of a parsed command line, and return its exit code.

    Raises ConfigError if PyTorch's step does not support the config, --python lacks a package, or --out is not writable.
    """
    console = make_console(bench.WIDTH)
    base = [*args.loaded.launch.config_argv, *DATA["synthetic"], *SAME_WORK]
    python = shutil.which(Path(args.python or sys.executable).expanduser())
    problems = [*train_step.find_problems(loading.load_config(base), 1), *refusal(loading.load_config(base).run)]
    problems += interpreter(args.python, python)
    settings = read_settings(args.settings) if args.settings else []
    if hardware.probe().kind == "cpu" and any(s["attention"] != "sdpa" for s in settings):
        problems.append(Problem("--settings", args.settings, "a CPU has only sdpa", "Write --settings=sdpa,layers."))
    if args.out:
        problems += check_writable("--out", Path(args.out).expanduser())
    if problems := problems or train_step.gpu_problems():
        raise ConfigError(problems)
    request: dict[str, Any] = {"devices": 1, "steps": args.steps, "warmup": args.warmup}
    request["limit_s"] = args.limit or None
    folder = BenchFolder(args.out, args.json, "peer")
    name, rounds = args.loaded.launch.name, args.rounds
    search = {"settings": settings, "tune_s": args.tune}
    failure = "one of the two could not be measured, or they do different work"
    return folder.run(lambda: run(base, name, str(python), rounds, request, search, folder, console), failure)


def refusal(run: RunConfig) -> list[Problem]:
    """Return a problem for each setting of the run that PyTorch's step does not support."""
    out = []
    model = run.model
    plain = {"qkv_bias": False, "qk_norm": False, "sliding_window": 0, "attention_softcap": 0.0, "logit_softcap": 0.0}
    plain |= {"norm_placement": "pre", "attn_logit_scale": 0.0}
    for key, value in plain.items():
        if (given := getattr(model, key)) != value:
            out.append(Problem(f"model.{key}", given, "transformers' Llama does not support it", f"Set {value}."))
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
            out.append(Problem(key, value, "the peer does not support it", remedy))
    return out


def interpreter(given: str, python: str | None) -> list[Problem]:
    """Return the problems of PyTorch's interpreter. given: value of --python. python: path of the interpreter, if found."""
    if python is None:
        return [Problem("--python", given, "no such program", "Name a Python that has torch and transformers.")]
    probe = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True, check=False)
    if not probe.returncode:
        return []
    rule = f"cannot import torch and transformers: {last_lines(probe.stderr)}"
    return [Problem("--python", given or python, rule, "Install them there, or name another interpreter.")]


# ---- The example on which both train


def export_example(request: dict[str, Any]) -> dict[str, Any]:
    """Write the first batch of a config, and return the `spec` of PyTorch's step. `run_case` calls this function in a child.

    Args:
        request: `argv`, the config's command line; `folder`, for files; `train`, a number of steps. If `train` is not 0, the
            initial weights are written too, and the losses of this number of steps on the batch are returned.
    """
    run = loading.load_config(request["argv"]).run
    devices = train_step.start_devices(run, 1)
    import jax.numpy as jnp

    from jaxtrain.hf.names import PREFIX, model_entries
    from jaxtrain.models.attention import rotary_frequencies
    from jaxtrain.optim.optimizer import make_schedule
    from jaxtrain.step import state
    from jaxtrain.step.batch import place_batch
    from jaxtrain.train.parity import compile_step, open_rows

    folder = Path(request["folder"])
    rows = open_rows(run)
    # Every token has weight 1, as in PyTorch.
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
    if request["train"]:
        program, train, _ = compile_step(resolve_max_segments(run, rows), devices)
        current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
        arrays: dict[str, Any] = state.to_host(current, PREFIX)
        theirs: dict[str, Any] = {
            e.hf_names[0]: e.to_hf(arrays[e.name.removeprefix(PREFIX)]) for e in model_entries(run.model).values()
        }
        np.savez(folder / "weights.npz", **theirs)
        spec["weights"] = str(folder / "weights.npz")
        for _ in range(request["train"]):
            current, values = train(current, place_batch(batch, program.batch, program.context))
            losses.append(float(values["loss"]))
    return {"verdict": OK, "spec": spec, "losses": losses}


def export(
    argv: Sequence[str], folder: Path, steps: int = 0, log: Path | None = None, limit_s: float | None = None
) -> dict[str, Any]:
    """Return the answer of `export_example` in a child on the CPU. The files in `folder` are used until PyTorch has run."""
    folder.mkdir(parents=True, exist_ok=True)
    request = {"argv": list(argv), "folder": str(folder), "train": steps}
    return run_case(EXPORT, request, log=log, environ={**os.environ, "JAX_PLATFORMS": "cpu"}, limit_s=limit_s)


def export_small(base: Sequence[str], folder: Path, log: Path | None = None, limit_s: float | None = None) -> dict[str, Any]:
    """Train a small model of the config's family on the CPU. Return the answer of `export`, which `compare_losses` takes."""
    heads = loading.load_config(base).run.model
    grouped = max(1, 4 * heads.num_kv_heads // heads.num_heads)
    small = [*SMALL, "model.num_heads=4", f"model.num_kv_heads={grouped}", "model.head_dim=16"]
    return export([*base, *(f"--config.{o}" for o in small)], folder, CHECKED, log, limit_s)


def run_peer(python: str, spec: Mapping[str, Any], log: Path | None = None, limit_s: float | None = None) -> dict[str, Any]:
    """Run PyTorch's step (SCRIPT) in a child process (train/child.py), and return its answer.

    Args:
        spec: the script's input: `spec` of the answer of `export`, and
            `platform`: "gpu", "cpu", or "any" for a GPU if there is one;
            `settings`: those to try in order, of which the first that works is timed; []: a search;
            `tune_s`: seconds of the search after which no further settings are tried;
            `warmup`, `steps`: numbers of steps.
    """
    return run_case("peer_torch", spec, log=log, limit_s=limit_s, python=python, script=SCRIPT)


def compare_losses(
    example: Mapping[str, Any], python: str, log: Path | None = None, limit_s: float | None = None, platform: str = "any"
) -> dict[str, Any]:
    """Train the example of `export_small` in PyTorch, and compare the losses.

    Args:
        example: the answer of `export_small`. If its verdict is not OK, it is returned.
        platform: see `run_peer`.

    Returns:
        `verdict`, with `why` if it is not OK. If PyTorch ran, also the losses `ours` and `theirs`, their greatest relative
        difference `off`, and the `allowed` one.
    """
    if example["verdict"] != OK:
        return dict(example)
    how = {"platform": platform, "settings": read_settings("sdpa,none"), "tune_s": 0.0, "warmup": 1, "steps": CHECKED - 1}
    answer = run_peer(python, example["spec"] | how, log, limit_s)
    if answer["verdict"] != OK:
        return answer
    error = max(abs(a / b - 1) for a, b in zip(answer["losses"], example["losses"], strict=True))
    out = {"ours": example["losses"], "theirs": answer["losses"], "off": error, "allowed": SAME}
    if not error <= SAME:
        return out | {"verdict": FAILED, "why": f"not the same work: losses of a small model differ by {error:.1e}"}
    return out | {"verdict": OK}


# ---- The comparison


def run(
    base: Sequence[str],
    name: str,
    python: str,
    rounds: int,
    request: Mapping[str, Any],
    search: Mapping[str, Any],
    folder: BenchFolder,
    console: rich.console.Console,
) -> int:
    """Time jaxtrain and PyTorch alternately and print the ratio. Return 0; 1 if a step fails or `compare_losses` does.

    Args:
        search: `settings` and `tune_s` of PyTorch's step (see `run_peer`).
    """
    limit_s, began, given = request["limit_s"], time.monotonic(), search["settings"]
    config, platform = loading.load_config(base).run, hardware.probe().kind

    def fail(why: str, **results: Any) -> int:
        print(why, file=sys.stderr)
        if results:
            folder.write("Peer", [why], **results)
        return 1

    def left() -> float | None:
        """Return the seconds that are left of the comparison of losses."""
        return limit_s and max(1.0, limit_s - (time.monotonic() - began))

    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary)
        logs = folder.path / "logs"
        with console.status("comparing losses of a small model ..."):
            small = export_small(base, files / "small", logs / "same_work.txt", left())
            same = compare_losses(small, python, logs / "same_work_torch.txt", left())
        if same["verdict"] != OK:
            return fail(f"comparison of losses: {same['verdict']}: {same['why']}", same_work=same)
        agree = f"{CHECKED} losses of a small model in float32 agree to {same['off']:.1e} (allowed {SAME:.0e})"
        bench.print_line(console, f"same work: {agree}")
        example = export(base, files, limit_s=left())
        if example["verdict"] != OK:
            return fail(f"batch: {example['verdict']}: {example['why']}")
        spec = example["spec"] | {"platform": platform, **search} | {key: request[key] for key in ("warmup", "steps")}
        turns: list[dict[str, Any]] = []
        ratio = None
        for who, i in ((who, i) for i in range(rounds) for who in ("jaxtrain", "torch")):
            label, log = f"{who}, round {i + 1}", logs / f"{who}_{i + 1}.txt"
            with console.status(f"{label} ..."):
                if who == "jaxtrain":
                    answer = run_case(train_step.CASE, {**request, "argv": list(base), "trace": ""}, log=log)
                else:
                    # PyTorch's search for its best settings has additional time.
                    most_s = limit_s and limit_s + (0 if spec["settings"] else spec["tune_s"])
                    answer = as_our_answer(run_peer(python, spec, log, most_s), config)
                    if answer["verdict"] == OK:
                        spec["settings"] = [answer["settings"]]  # the settings are chosen only once
            turns.append({"who": who, "name": label, **answer})
            bench.print_line(console, f"{label}: {bench.step_result(answer)}")
            ratio = compare_speeds(turns)
            table = bench.step_table(f"{name} against PyTorch", {t["name"]: t for t in turns})
            lines = [*bench.markdown(table), f"{agree}.", ""]
            lines += [*(f"- {line.strip()}" for line in describe(turns, ratio, given)), ""]
            folder.write("Peer", lines, same_work=same, given=given, turns=turns, compared=ratio)
            if answer["verdict"] != OK:
                return fail(f"{label}: {answer['verdict']}: {answer['why']}")
    bench.print_table(console, bench.step_table("", {t["name"]: t for t in turns}))
    for line in describe(turns, ratio, given):
        bench.print_line(console, line, "bold" if line.startswith("ratio") else "")
    folder.print_cpu_note(console)
    return 0


def as_our_answer(answer: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return PyTorch's answer in the form of train_step.measure, with MFU by jaxtrain's count of FLOPs."""
    if answer["verdict"] != OK:
        return answer
    seconds, losses = answer.pop("step_times"), answer.pop("losses")
    step_s = train_step.spread(seconds)
    peak = step_log.peak_tflops(run, answer["device"])
    rates = step_log.rates_of(run, 1, peak).rates(step_s["median"]) | {"peak_tflops": peak}
    # PyTorch's checkpointing recomputes other activations than the remat policy, so HFU is unknown.
    rates["hfu"] = None if answer["settings"]["checkpoint"] else rates["mfu_causal"]
    steps = {"steps": len(seconds), "warmup": len(losses) - len(seconds), "step_s": step_s}
    unknown = {"compile_s": None, "planned": None, "not_planned": ""}
    memory = {"peak_gib": answer.pop("reserved_gib"), "compiled_gib": None, "budget_gib": None}
    return answer | rates | steps | unknown | {"memory": memory, "loss": {"first": losses[0], "last": losses[-1]}}


def compare_speeds(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return jaxtrain's tokens/s over PyTorch's: the ratio of medians, and the least and greatest ratio of a round.

    Return None before the end of the first round.
    """
    speed = {who: [t["tokens_per_s"] for t in turns if t["who"] == who and t["verdict"] == OK] for who in ("jaxtrain", "torch")}
    pairs = [a / b for a, b in zip(*speed.values(), strict=False)]
    if not pairs:
        return None
    ours, other = (statistics.median(v) for v in speed.values())
    return {"ratio": ours / other, "least": min(pairs), "most": max(pairs), "rounds": len(pairs)}


def describe(
    turns: Sequence[Mapping[str, Any]], ratio: Mapping[str, Any] | None, given: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return lines with PyTorch's settings and the ratio. given: settings of --settings; [] after a search."""
    peers = [t for t in turns if t["who"] == "torch" and t["verdict"] == OK]
    if not peers or ratio is None:
        return []
    p, s = peers[0], peers[0]["settings"]
    compiled = "no torch.compile" if s["compile"] == "none" else f"torch.compile of {s['compile']}"
    out = [
        f"torch {p['torch']}, transformers {p['transformers']}: {compiled}, SDPA {s['attention']}, activation checkpointing "
        f"{'of every layer' if s['checkpoint'] else 'off'} ({'settings given' if given else 'settings found by a search'}), "
        "fused AdamW, autocast over float32"
    ]
    if p.get("dynamo"):
        out.append(f"  torch.compile: {', '.join(f'{count} {what}' for what, count in p['dynamo'].items())}")
    for t in p["tried"]:
        result = f"{t['step_s']:.4g} s" if t["step_s"] else t["why"]
        again = ", checkpointing" if t["checkpoint"] else ""
        out.append(f"  tried: SDPA {t['attention']}, compile {t['compile']}{again}: {result}")
    text = f"ratio ours/theirs in tokens/s: {ratio['ratio']:.3f} (rounds {ratio['least']:.3f} to {ratio['most']:.3f})"
    return [*out, text]


if __name__ == "__main__":
    sys.exit(main())
