"""Compare MaxText's compiled train step with ours by one estimator: same model, batch, layout, dtypes, and GPUs.

    .venv/bin/python -m benchmarks.peer_maxtext --python=/path/to/maxtext/bin/python --markdown=docs/evidence/peer_maxtext.md

Compiles Llama 3 8B with one sequence of 8192 tokens per GPU and fsdp=8, ahead of time, for a topology of eight H200s without
hardware. MaxText's step is compiled in the environment of `--python` (benchmarks/peer_maxtext_step.py), our step in this
environment. Then both steps are read in the same way: peak memory as XLA counts it, and the plan's roofline of the scheduled
program. No GPU is needed. `--out` keeps the compiled programs in a folder; `--read` reads this folder and compiles nothing. The
file of `--markdown` keeps its text from the heading "## Reasons for the differences" on.

Exit code 0: compared; 1: a step could not be compiled or read; 2: --python has no MaxText. These commands install it:

    uv venv --python=3.12 maxtext
    uv pip install --python maxtext/bin/python maxtext==0.2.5 --no-deps
    uv pip install --python maxtext/bin/python jax==0.12.0.1 jaxlib==0.12.0.1 jax-cuda12-plugin==0.12.0.1 \\
        jax-cuda12-pjrt==0.12.0.1 nvidia-cuda-nvcc-cu12 aqtp drjax flax grain huggingface-hub jinja2 omegaconf optax \\
        orbax-checkpoint packaging pathwaysutils pillow qwix sentencepiece sympy tiktoken tokamax transformers
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_maxtext_read import PARTS, Read, part, place, read
from jaxtrain.config import hardware
from jaxtrain.config.installed import versions
from jaxtrain.config.numbers import number, percent
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import loading
from jaxtrain.metrics.receipt import local_time
from jaxtrain.models import flops
from jaxtrain.plan.program import hlo, roofline
from jaxtrain.plan.topology import TopologyError, parse_topology
from jaxtrain.report.tables import markdown_table
from jaxtrain.runtime.startup import start_jax

REPO = Path(__file__).resolve().parent.parent
STEP = Path(__file__).with_name("peer_maxtext_step.py")
TOPOLOGY = "h200:8"
CONFIG = ["--config=configs/llama3_8b.py", "--config.train.grad_accum=1", "--config.train.global_batch=8"]
COMMAND = "python -m benchmarks.peer_maxtext --python=PATH --markdown=docs/evidence/peer_maxtext.md"
EXPLAINED = "## Reasons for the differences"

# The config of the same work in MaxText's keys. By MaxText's defaults, moments are float32, gradients are clipped to norm 1,
# and z-loss and dropout are off.
KEYS = [
    "model_name=llama3-8b",
    "per_device_batch_size=1",
    "max_target_length=8192",
    "ici_fsdp_parallelism=8",
    "weight_dtype=float32",
    "dtype=bfloat16",
    "attention=cudnn_flash_jax",
    "scan_layers=true",
]
# Further keys that MaxText's ahead-of-time command needs.
AHEAD = [
    "run_name=peer",
    "compile_topology=a3",
    "compile_topology_num_slices=1",
    "hardware=gpu",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "skip_jax_distributed_system=true",
]
XLA: dict[str, dict[str, Any]] = {"XLA's own": {}, "O1": {"optimization_level": "O1"}}
OURS = "jaxtrain's"  # compiler options of our full-remat step, given to MaxText's program too


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step to compile, of MaxText or jaxtrain."""

    who: str  # MaxText | jaxtrain
    what: str  # name in the table
    options: str  # compiler options: a key of XLA, or OURS
    keys: tuple[str, ...]  # MaxText's keys, or overrides of our config

    @property
    def name(self) -> str:
        """Return the name of the step's files, without a suffix."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.who} {self.what} {self.options.removesuffix(chr(39) + 's')}".lower())


FULL = "--config.remat.policy=full"
LOOP, UNROLL = "--config.parallel.scan_layers=true", "--config.parallel.scan_layers=false"
FIRST, TILED = "param_scan_axis=0", "num_vocab_tiling=8"
# The two cases whose parts are compared: full recomputation under the same compiler options.
PAIR = (Case("MaxText", "full", OURS, ("remat_policy=full",)), Case("jaxtrain", "full", OURS, (FULL, LOOP)))
CASES = (
    *(Case("MaxText", "full", options, ("remat_policy=full",)) for options in XLA),
    PAIR[0],
    # FIRST: layers are the first axis of weights, which avoids transposes. TILED: logits of an eighth of the tokens at a time.
    *(Case("MaxText", f"full, {FIRST}", options, ("remat_policy=full", FIRST)) for options in ("O1", OURS)),
    Case("MaxText", f"full, {TILED} {FIRST}", "O1", ("remat_policy=full", TILED, FIRST)),
    *(Case("MaxText", "save_dot_except_mlp", options, ("remat_policy=save_dot_except_mlp",)) for options in XLA),
    *(Case("MaxText", "minimal_with_context", options, ("remat_policy=minimal_with_context",)) for options in (*XLA, OURS)),
    PAIR[1],
    Case("jaxtrain", "full, unrolled", OURS, (FULL, UNROLL)),
    Case("jaxtrain", "auto, loop", OURS, (LOOP,)),
    Case("jaxtrain", "auto, one by one", OURS, (UNROLL,)),
)


# ---- Compiling


class PeerError(RuntimeError):
    """MaxText is not installed, jaxtrain's config has problems, or a step could not be compiled."""


def check_python(python: str) -> str:
    """Return the version of MaxText in the environment of an interpreter. Raises PeerError if it is not installed."""
    ask = "import importlib.metadata as m; print(m.version('maxtext'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise PeerError(f"--python={python}: {error.strerror}. Name the Python of an environment that has MaxText.") from None
    if done.returncode:
        raise PeerError(
            f"--python={python}: this environment has no maxtext ({(done.stderr.strip().splitlines() or ['no output'])[-1]}). "
            "The head of benchmarks/peer_maxtext.py says how to make one."
        )
    return done.stdout.strip()


def _run(keys: Sequence[str] = ()) -> RunConfig:
    """Return jaxtrain's CONFIG, which has the model and batch of MaxText's KEYS, with the overrides `keys`.

    Raises PeerError if the config has problems.
    """
    loaded = loading.load_config([CONFIG[0].replace("=", f"={REPO}/"), *CONFIG[1:], *keys])
    if loaded.problems:
        raise PeerError(f"{' '.join(keys)}: {loaded.problems}")
    return loaded.run


def compile_ours(cases: Sequence[Case], out: Path) -> dict[str, Any]:
    """Compile jaxtrain's steps and write them to `out`. Return the compiler options of jaxtrain's case in PAIR."""
    from jaxtrain.plan.compile import compile_step

    theirs: dict[str, Any] = {}
    for case in cases:
        try:
            compiled = compile_step(_run(case.keys), parse_topology(TOPOLOGY))
        except RuntimeError as error:  # an error of XLA can contain a whole program
            raise PeerError(f"our step ({case.name}) was not compiled: {str(error).splitlines()[0][:300]}") from error
        memory: Any = compiled.executable.memory_analysis()
        facts = {
            "options": compiled.chosen.options,
            "peak": memory.peak_memory_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "seconds": compiled.seconds,
            "date": local_time()[:10],
            "versions": versions(),
        }
        (out / f"{case.name}.hlo").write_text(compiled.text)
        (out / f"{case.name}.pb").write_bytes(compiled.buffers)
        (out / f"{case.name}.json").write_text(json.dumps(facts, indent=1))
        print(f"{case.name}: {facts['peak'] / 2**30:.2f} GiB, compiled in {compiled.seconds:.0f} s", flush=True)
        if case == PAIR[1]:
            theirs = compiled.chosen.options
    return theirs


def compile_theirs(python: str, cases: Sequence[Case], ours: Mapping[str, Any], out: Path) -> None:
    """Compile MaxText's steps. One process compiles all cases with the same keys. ours: jaxtrain's compiler options.

    Raises PeerError with the end of the log of a failed process.
    """
    machine = parse_topology(TOPOLOGY)
    description = out / "description.txtpb"
    description.write_text(machine.description)
    for keys in dict.fromkeys(case.keys for case in cases):
        options = {c.name: ours if c.options == OURS else XLA[c.options] for c in cases if c.keys == keys}
        arguments = [f"--out={out}", f"--description={description}", f"--capability={machine.gpu.sm / 10}"]
        arguments += [f"--gpus={machine.total}", f"--options={json.dumps(options)}", "--", *AHEAD, *KEYS, *keys]
        log = out / f"{next(iter(options))}.log"
        with log.open("w") as to:
            done = subprocess.run([python, str(STEP), *arguments], stdout=to, stderr=subprocess.STDOUT, cwd=out)
        text = log.read_text()
        print("\n".join(line.removeprefix("peer_maxtext: ") for line in text.splitlines() if line.startswith("peer_maxtext: ")))
        if done.returncode:
            raise PeerError(
                f"MaxText's step with {' '.join(keys)} was not compiled ({log}):\n" + "\n".join(text.splitlines()[-5:])
            )


# ---- The page

HEADER = [
    *("step", "remat", "compiler options", "peak GiB", "planned ms", "exposed ms", "GEMMs ms", "attention ms"),
    *("memory-bound ms", "memory-bound GB", "wire GB", "MFU causal"),
]


def table(steps: Mapping[Case, Read]) -> str:
    """Return the Markdown table of all steps: peak memory, planned times, traffic and MFU."""
    lines = []
    for case, r in steps.items():
        t = r.timed
        figures = (number(r.peak_gib, 2), *(number(x, 1) for x in (t.step_ms, t.exposed_ms, t.gemm_ms, t.attention_ms)))
        figures += (*(number(x, 1) for x in (t.memory_ms, r.memory_gb, r.wire_gb)), percent(r.mfu))
        who = f"{case.who} {r.facts['versions']['maxtext']}" if case.who == "MaxText" else case.who
        lines.append([who, f"`{case.what}`" if case.who == "MaxText" else case.what, case.options, *figures])
    return "\n".join(markdown_table(HEADER, lines))


def parts_table(steps: Mapping[Case, Read]) -> str:
    """Return the table of memory-bound kernels' traffic (GB) by part of the step (PARTS), for PAIR."""
    sums = []
    for case in PAIR:
        gb: dict[str, float] = defaultdict(float)
        for k in steps[case].timed.kernels:
            if k.kind == "memory":
                gb[part(k)] += k.gb
        sums.append(gb)
    names = [name for name, _ in PARTS] + ["others"]
    lines = [[name, *(number(gb[name], 1) for gb in sums)] for name in names]
    lines.append(["together", *(number(sum(gb.values()), 1) for gb in sums)])
    return "\n".join(markdown_table(["GB, full remat, jaxtrain's options", *(c.who for c in PAIR)], lines))


def waits(steps: Mapping[Case, Read], least_ms: float = 0.5) -> str:
    """Return the table of exposed collectives by kind and source line. least_ms: shorter exposed times are left out."""
    lines = []
    for case, r in steps.items():
        sums: dict[tuple[str, str, str, str], float] = defaultdict(float)
        for m in r.moved:
            sums[m.kind, m.dtype, roofline.op_label(m.op_name), place(m.source)] += m.exposed_ms
        for (kind, dtype, label, source), ms in sorted(sums.items(), key=lambda item: -item[1]):
            if ms >= least_ms:
                lines.append([f"{case.who} {case.what}, {case.options}", f"{kind} {dtype}", f"{label} {source}", number(ms, 1)])
    return "\n".join(markdown_table(["step", "collective", "where", "exposed ms"], lines))


def held_table(steps: Mapping[Case, Read], most: int = 8) -> str:
    """Return the table of the largest buffers at the peak, for PAIR."""
    lines = [[c.who, f"{what}", number(gib, 2)] for c in PAIR for gib, what in steps[c].held[:most]]
    return "\n".join(markdown_table(["step", "held at the peak, besides arguments", "GiB"], lines))


def markdown(steps: Mapping[Case, Read], explained: str) -> str:
    """Return the page. explained: the end of the page, which is written by hand."""
    maxtext, ours = (next(r for c, r in steps.items() if c.who == who).facts["versions"] for who in ("MaxText", "jaxtrain"))
    theirs = f"MaxText {maxtext['maxtext']}"
    where = f"{next(iter(steps.values())).facts['date']}, {os.cpu_count()} CPU cores, no GPU"
    on = f"{theirs} on jax {maxtext['jax']}, jaxtrain on jax {ours['jax']}"
    return f"""# MaxText's step beside ours

Two programs for the same work, read by one meter: the train step of {theirs} and that of jaxtrain, both compiled by
XLA:GPU for eight described H200s. **Compiled on CPUs; nothing was run on a GPU.** Planned times are the plan's roofline
([plan.md](plan.md)) at published kernel rates: good for comparing programs, not for promising a step time
([planned_vs_published.md](planned_vs_published.md)).

```text
{COMMAND}
```

{where}; {on},
each with that release's CUDA plugin and without CUDA's libraries. MaxText is compiled by its own ahead-of-time
command (`maxtext.trainers.pre_train.train_compile`), in which only devices, cuDNN's version and compiler options are
replaced. Its keys: `{" ".join(KEYS)}`. Ours: `{" ".join(CONFIG)}`.

{table(steps)}

Peak: XLA's `memory_analysis()`, arguments included. Exposed: collectives that compute waits for. Memory-bound: kernels that
are neither GEMM nor attention, and waits for copies inside the GPU. MFU causal: model FLOPs, of attention those inside the
mask, over the dense peak. Options: "XLA's own" are none, "O1" is `optimization_level=O1`, "jaxtrain's" are the choice
of `jaxtrain/step/compiler.py` for that step, and in MaxText's rows its choice for ours with full remat. In all of them
XLA's trials of ways to write a fusion are off, as in every plan.

## Where memory-bound bytes go

{parts_table(steps)}

## Which collectives are waited for

{waits(steps)}

## Memory at the peak

{held_table(steps)}

{explained}"""


# ---- The command


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_maxtext", description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--python", help="of an environment that has MaxText")
    source.add_argument("--read", type=Path, metavar="FOLDER", help="what an earlier --out kept; compiles nothing")
    parser.add_argument("--out", type=Path, help="keeps what is compiled in this folder")
    parser.add_argument("--markdown", type=Path, help="writes the page to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, read and print. Return 0; 1 if a step could not be compiled or read; 2 if the command is wrong."""
    args = parser().parse_args(argv)
    start_jax(hardware.probe())
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.read or args.out or Path(scratch)).resolve()
        try:
            if not args.read:
                check_python(args.python)
                folder.mkdir(parents=True, exist_ok=True)
                chosen = compile_ours([c for c in CASES if c.who == "jaxtrain"], folder)
                compile_theirs(args.python, [c for c in CASES if c.who == "MaxText"], chosen, folder)
            run = _run()
            per_token = flops.per_token(run.model, run.data.seq_len).causal
            machine, tokens = parse_topology(TOPOLOGY), run.data.seq_len
            steps = {case: read(folder, case.name, machine, per_token, tokens) for case in CASES}
        except PeerError as error:
            print(f"peer_maxtext: {error}", file=sys.stderr)
            return 2 if str(error).startswith("--python") else 1
        except (hlo.HloError, TopologyError, OSError) as error:
            print(f"peer_maxtext: {error}", file=sys.stderr)
            return 1
    print(table(steps))
    if args.markdown:
        before = args.markdown.read_text() if args.markdown.exists() else ""
        _, heading, rest = before.partition(EXPLAINED)
        args.markdown.write_text(markdown(steps, heading + rest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
