"""Everything that is to be measured on one Hopper GPU, in calls of less than ten minutes each.

    python -m benchmarks.hopper --part=1 --out=runs/hopper

    1  rates (kept for later plans); cuDNN beside Pallas, GEMMs; attention against its definition; other kernels
    2  llama3_8b:half at 8192, planned beside measured: bf16, FP8, Pallas attention, layers in a loop, XLA's options, a trace
    3  llama3_8b:half against PyTorch, in turns
    4  llama3_1b, bf16 and FP8; configs/tiny.py through the command line; llama3_1b against PyTorch
    5  preflight, recorded; lines on the GPU and the receipt of a run; what they cost (benchmarks/operate.py)
    6  experts: grouped matmuls against their definition, their floors and dense GEMMs; steps of a small Mixtral

Parts 2 and 3 need 100 GiB: an H200, not a card of 80 GB. All six take 56 minutes at most. With half an hour, run 1, 2, 3 and
what there is time for of the others; on 80 GB 1, 4, 5, 6. What there is no time for is left out and said, with the command for
it: --only=NAME,NAME runs some of a part. Rates that part 1 measured stand in OUT/rates; later parts take them from there where
their machine has none.

Writes results.md, results.json, a receipt and logs to OUT/part1 and so on (a second time to OUT/part1_2), and prints a short
table last. Exit code 0; 1 something failed; 2 no such GPU here, or a wrong argument; 130 Ctrl-C, what was done is kept. An aim
that is not reached is no failure. --smoke goes through a part on a CPU in tiny shapes and measures nothing.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from benchmarks import operate
from jaxtrain import hardware, launch
from jaxtrain.bench import kernels, report, suite
from jaxtrain.bench import peer as peers
from jaxtrain.bench.case import LATE, OK, apart, last_words, program
from jaxtrain.bench.case import run as run_program
from jaxtrain.bench.measure import DATA
from jaxtrain.bench.parts import BAD, GOOD, INTERRUPTED, OUT, Node, Outcome, Part, run_parts
from jaxtrain.plan import rates

SECONDS = 560  # of a part
# GiB of a card that parts 2 and 3 need: by plan a step of llama3_8b:half takes 88.2 on a card of 80 GB, where auto keeps
# nothing for its backward pass.
NEED_GIB, LARGE = 100.0, (2, 3)

# Of llama3_1b fewer microbatches than it ships with, of the same size: a whole batch would take ten seconds a step. Its update
# then counts for more of a step than in training. Half as much at a time beside PyTorch, which holds all logits.
HALF = (f"--config={launch.REPO}/configs/llama3_8b.py:half",)
SIXTEEN = (f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1", "--config.train.global_batch=16")
ONE, ONE_PEER = (*SIXTEEN, "--config.train.grad_accum=4"), (*SIXTEEN, "--config.train.grad_accum=8")
AIM_MFU, AIM_FP8, AIM_PEER = 0.60, 1.4, 1.15
AIMS = ("", "reached", "aim")

LOOP = (*HALF, "--config.compiler.unroll=false")  # as shipped, layers stand one by one, and XLA's level O1 has no use

# Case -> config and overrides.
HALVES = {
    "8b:half": HALF,
    "8b:half fp8": (*HALF, "--config.precision=fp8"),
    "8b:half pallas": (*HALF, "--config.attention.impl=pallas"),
    "8b:half loop": LOOP,
    "8b:half loop O0": (*LOOP, "--config.compiler.options=optimization_level=O0"),
    "8b:half XLA's options": (*HALF, "--config.compiler.defaults=false"),
}
# Mixtral's layers, half as wide and 6 of them: 2.3 B parameters, of which a token meets 0.7 B, and 42 GiB by plan.
MIXTRAL = (
    f"--config={launch.REPO}/configs/mixtral_8x7b.py:gpus=1",
    *("--config.model.num_layers=6", "--config.model.d_model=2048", "--config.model.d_ff=7168"),
    *("--config.model.num_heads=16", "--config.model.num_kv_heads=4", "--config.mesh.expert=1"),
    *("--config.train.global_batch=8", "--config.train.grad_accum=8", "--config.compiler.unroll=true"),
)
TINY_EXPERTS = (*operate.TINY, "--config.model.num_experts=4", "--config.model.experts_per_token=2")
PLACES = "--config.experts.capacity=1.25"
# Case -> how tokens reach its experts: none is dropped, or each expert has places for a quarter more than an even share.
MIXTRALS = {
    "mixtral": ("--config.experts.impl=pallas",),
    "mixtral capacity": (PLACES,),
    "mixtral capacity fp8": (PLACES, "--config.precision=fp8"),
}
ONES = {"1b": ONE, "1b fp8": (*ONE, "--config.precision=fp8")}


def steps(name: str, argv: Sequence[str], trace: bool = False, tiny: Sequence[str] = operate.TINY) -> Part:
    """A case of train steps. tiny: what stands for it in a smoke test."""

    def act(node: Node, limit_s: float) -> Outcome:
        """Train steps, planned beside measured."""
        argv_here = [*(tiny if node.smoke else argv), *DATA["synthetic"]]
        ask = {"argv": argv_here, "devices": 1, "warmup": 2, "steps": 3 if node.smoke else 6, "limit_s": 0.8 * limit_s}
        ask["trace"] = node.folder.trace(name) if trace else ""
        answer = apart("steps", ask, log=node.folder.log(name), limit_s=limit_s)
        lines = report.markdown(name, ("", ""), report.step_details(name, answer))
        if answer["verdict"] != OK:
            verdict = OUT if answer["verdict"] == LATE else BAD
            return Outcome(verdict, f"{answer['verdict']}: {answer['why']}", lines, answer)
        cells = dict(zip(report.STEP_HEADINGS, report.step_row(name, answer), strict=True))
        parts = [f"{cells['step s']} s", f"{cells['tokens/s']} tokens/s", f"MFU {cells['MFU causal']} causal"]
        return Outcome(GOOD, ", ".join([*parts, f"peak {cells['peak GiB']} GiB"]), lines, answer)

    return Part(name, act, 200.0 if trace else 150.0, 90.0)


def trace_report(of: str) -> Part:
    """Where the time of a traced case went. It needs no GPU, and can be made of OUT/partN/traces later."""

    def act(node: Node, limit_s: float) -> Outcome:
        """Where the time of the trace went."""
        target = Path(node.folder.trace(of))
        if not target.exists():
            return Outcome(OUT, f"{of} left no trace")
        command = program("profile", str(target), f"--html={target}.html", f"--json={target}.json")
        code, said = run_program(command, node.path / "logs" / "trace.txt", limit_s=limit_s)
        lines = [f"## Where the time of {of} went", "", "```text", said.strip(), "```", ""]
        if code is None:
            return Outcome(OUT, f"not done after {limit_s:.0f} s: {shlex.join(command[1:])}", lines)
        return Outcome(BAD, last_words(said), lines) if code else Outcome(GOOD, f"{target}.html", lines)

    remedy = f"no GPU is needed for it: python -m jaxtrain.profile OUT/part2/traces/{report.safe(of)} --html=trace.html"
    return Part("trace", act, 60.0, 20.0, remedy)


def kernel(kind: str, most_s: float) -> Part:
    """Kernels of one kind against their floors."""

    def act(node: Node, limit_s: float) -> Outcome:
        """Kernels against their floors."""
        answer = apart("kernels", {"kind": kind, "limit_s": 0.7 * limit_s}, log=node.folder.log(kind), limit_s=limit_s)
        rows = answer.get("rows", [])
        cells = [kernels.row(r) for r in rows]
        lines = report.markdown(f"Kernels: {kind}", kernels.HEADINGS, cells)
        bad = [f"{r['kind']} {r['what']}: {r['why']}" for r in rows if r["verdict"] not in (OK, "not timed")]
        timed = [r for r in rows if r["verdict"] == OK]
        text = f"{len(timed)} timed"
        if reached := [r["of_floor"] for r in timed if r["of_floor"]]:
            text += f", {min(reached):.0%} to {max(reached):.0%} of their floors"
        verdict = BAD if bad else GOOD
        if answer["verdict"] != OK:
            verdict = OUT if answer["verdict"] == LATE and not bad else BAD
            text += f"; {answer['why']}"
        return Outcome(verdict, "; ".join([text, *bad]), lines, answer, (kernels.HEADINGS, cells))

    return Part(f"kernels: {kind}", act, most_s, 30.0)


def rates_kept(node: Node, limit_s: float) -> Outcome:
    """What GEMMs, attention and memory reach, for plans; also in OUT/rates."""
    outcome = suite.part_rates(node, limit_s)
    gpu = hardware.lookup(node.devices.name)
    if outcome.verdict == GOOD and gpu and (file := rates.path(gpu.name)).exists():
        folder = node.path.parent / "rates"
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder)
    return outcome


def rates_found(out: Path, gpu_name: str) -> str:
    """Takes the rates of an earlier part into use where this machine has none; says so. "" where there is nothing to take."""
    gpu = hardware.lookup(gpu_name)
    kept = rates.path(gpu.name, out / "rates") if gpu else None
    if gpu is None or kept is None or not kept.exists() or (file := rates.path(gpu.name)).exists():
        return ""
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept, file)
    return f"plans use the rates in {kept}, now {file}"


def peer(name: str, argv: Sequence[str], python: str, why: str) -> Part:
    """Against PyTorch, in turns. why: what is wrong with its interpreter, "" if nothing."""

    def act(node: Node, limit_s: float) -> Outcome:
        """The same model and batch in PyTorch, in turns."""
        if why:
            return Outcome(OUT, why)
        out = node.path / report.safe(f"peer_{name}")
        more = ["--peer=torch", f"--peer-python={python}", "--devices=1", "--steps=6", "--warmup=2", f"--out={out}"]
        code, said = run_program(
            program("bench", *(operate.TINY if node.smoke else argv), *more), out / "log.txt", limit_s=limit_s
        )
        lines = [f"## {name} against PyTorch", "", "```text", said.strip(), "```", ""]
        file = out / "results.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        ratio = found.get("compared")
        if code and not ratio:
            return Outcome(BAD, last_words(said), lines, found)
        if not ratio:
            return Outcome(OUT, f"no pair of turns was done in {limit_s:.0f} s", lines, found)
        text = f"ours/theirs {ratio['ratio']:.3f} in tokens/s over {ratio['rounds']} rounds"
        return Outcome(BAD if code else GOOD, text, lines, found)

    return Part(f"peer: {name}", act, float(SECONDS), 120.0)


def items(part: int, python: str, why: str = "") -> list[Part]:
    """What a part does, the most wanted first. why: what is wrong with the peer's interpreter."""
    return {
        1: [
            Part("rates", rates_kept, 150.0, 45.0),
            kernel("attention", 120.0),
            kernel("gemm", 90.0),
            Part("attention is right", suite.part_kernels, 150.0, 45.0),
            *(kernel(kind, 60.0) for kind in ("loss", "norm", "optimizer")),
        ],
        2: [
            steps("8b:half", HALF, trace=True),
            *(steps(name, argv) for name, argv in HALVES.items() if name != "8b:half"),
            trace_report("8b:half"),
        ],
        3: [peer("8b:half", HALF, python, why)],
        4: [
            *(steps(name, argv) for name, argv in ONES.items()),
            Part("configs/tiny.py", suite.part_run, 120.0, 45.0),
            peer("1b", ONE_PEER, python, why),
        ],
        5: [*operate.ITEMS],
        6: [
            Part("experts are right", suite.part_experts, 120.0, 45.0),
            kernel("experts", 120.0),
            *(steps(name, (*MIXTRAL, *how), tiny=(*TINY_EXPERTS, *how)) for name, how in MIXTRALS.items()),
        ],
    }[part]


def aims(done: Mapping[str, Any]) -> list[list[str]]:
    """[what, reached, aim] for those aims that this part can tell."""

    def of(name: str, *keys: str) -> Any:
        value: Any = done.get(name, {}).get("data")
        for key in keys:
            value = (value or {}).get(key)
        return value

    half, fp8 = of("8b:half", "tokens_per_s"), of("8b:half fp8", "tokens_per_s")

    def beside_plan(name: str) -> list[list[Any]]:
        """Time and peak of a step over what was planned."""
        planned, measured, peak = of(name, "planned"), of(name, "step_s", "median"), of(name, "memory", "peak_gib")
        step, memory = planned and measured and measured / planned["step_s"], planned and peak and peak / planned["peak_gib"]
        return [
            [f"{name}, measured over planned step", step or None, "0.85 to 1.15", "{:.2f}".format],
            [f"{name}, measured over planned peak", memory or None, "0.90 to 1.10", "{:.2f}".format],
        ]

    rows = [
        ["8b:half, MFU causal", of("8b:half", "mfu_causal"), f"{AIM_MFU:.0%}", report.percent],
        ["8b:half, fp8 over bf16", fp8 / half if fp8 and half else None, f"{AIM_FP8} x", "{:.2f} x".format],
        *beside_plan("8b:half"),
        *(row for name in MIXTRALS for row in beside_plan(name)),
        ["8b:half, ours over PyTorch", of("peer: 8b:half", "compared", "ratio"), f"{AIM_PEER}", "{:.2f}".format],
        ["1b, ours over PyTorch", of("peer: 1b", "compared", "ratio"), f"{AIM_PEER}", "{:.2f}".format],
    ]
    return [[what, show(value), aim] for what, value, aim, show in rows if value is not None]


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.hopper", description=__doc__, formatter_class=raw)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4, 5, 6), required=True, help="see above")
    parser.add_argument("--out", type=Path, required=True, help="a folder; each part has its own in it")
    parser.add_argument("--only", default="", help="NAME,NAME: these of the part, as its table names them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the part, at most (%(default)s)")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    return parser


def refusal(args: argparse.Namespace, devices: hardware.Devices, why: str) -> str:
    """Why this part cannot be measured as asked, with the remedy; "" if it can."""
    names = [part.name for part in items(args.part, args.peer_python)]
    if unknown := [name for name in filter(None, args.only.split(",")) if name not in names]:
        return f"--only={','.join(unknown)}: part {args.part} has no such item. It has {', '.join(names)}."
    if args.part == 3 and why:
        return why
    if args.smoke:
        return ""
    if devices.kind != "gpu" or not devices.count:
        return f"no GPU here: {devices.source}. --smoke goes through a part on the CPU."
    if args.part in LARGE and devices.memory_gib < NEED_GIB:
        here = f"{devices.name} has {devices.memory_gib:.0f} GiB"
        return f"part {args.part} needs {NEED_GIB:.0f} GiB, and {here}. Run it on an H200; here, run --part=4."
    return ""


def free(out: Path, part: int) -> Path:
    """The first folder of this part in `out` that is not there yet: what was measured before stays."""
    path, number = out / f"part{part}", 1
    while path.exists():
        number += 1
        path = out / f"part{part}_{number}"
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part and returns its exit code."""
    args = parser().parse_args(argv)
    args.out, args.peer_python = args.out.expanduser(), str(Path(args.peer_python).expanduser())
    devices = hardware.probe()
    why = "; ".join(map(str, peers.interpreter(args.peer_python))) if args.part in (3, 4) else ""
    if wrong := refusal(args, devices, why):
        print(wrong, file=sys.stderr)
        return 2
    console = rich.console.Console() if sys.stdout.isatty() else rich.console.Console(width=report.WIDTH)
    if why:
        report.say(console, f"PyTorch is left out: {why}")
    if not args.smoke and (said := rates_found(args.out, devices.name)):
        report.say(console, said)
    folder = report.Folder(str(free(args.out, args.part)), "", "hopper")
    node = Node(dataclasses.replace(devices, count=1), args.smoke, folder)
    only = [*filter(None, args.only.split(","))]
    chosen = [part for part in items(args.part, args.peer_python, why) if not only or part.name in only]

    def head(done: Mapping[str, Any]) -> list[str]:
        found = [] if args.smoke else aims(done)
        return report.markdown("Aims", AIMS, found) if found else []

    def last(done: Mapping[str, Any]) -> None:
        if found := [] if args.smoke else aims(done):
            report.show(console, "", AIMS, found)
        if rest := [part.name for part in chosen if done.get(part.name, {"verdict": OUT})["verdict"] == OUT]:
            again = [
                "python",
                "-m",
                "benchmarks.hopper",
                f"--part={args.part}",
                f"--out={args.out}",
                f"--only={','.join(rest)}",
            ]
            report.say(console, f"not measured: {shlex.join(again)}")
        report.say(console, str(node.path))

    try:
        return run_parts(chosen, node, console, args.seconds, f"Hopper, part {args.part}", head, last)
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; what was done is kept.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
