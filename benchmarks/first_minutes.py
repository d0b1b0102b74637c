"""The first minutes on one H100 or H200: correctness and speed, in the order of their value, kept from call to call.

    python -m benchmarks.first_minutes --seconds=560 --work=/tmp/first_minutes --out=runs/first_minutes

The same command again, on the same machine, continues: --work holds the results and the compiled programs, and finished items
are not repeated. On a later machine, --earlier names a folder with results.json files of earlier machines. An item that one of
them has is not repeated either, unless its result is of another kind of GPU, as a speed is. After each item, --out has
results.json, results.md, logs.tar.gz, rates and a trace, as at most eight files of at most 15 MiB: a call that is cut off loses
one item. benchmarks/gpu_items.py has the items.

If JAX cannot compute on the GPU, nothing else is tried. --smoke runs tiny shapes on a CPU.

Exit code: 0; 1 an item failed; 2 a wrong argument, or no GPU and no --smoke; 3 JAX cannot compute on the GPU; 130 Ctrl-C.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import sysconfig
import tarfile
import time
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_items
from benchmarks.gpu_items import HALF_GIB, MAX_FILE_BYTES, background
from jaxtrain.config import environment, hardware, launch
from jaxtrain.config.command_line import INTERRUPTED, REFUSED, make_console
from jaxtrain.config.schema import Problem
from jaxtrain.node import suite
from jaxtrain.node.suite import BAD, GOOD, OFF, OUT, Node, SuitePart, run_parts
from jaxtrain.report import bench
from jaxtrain.train.child import LATE

NO_COMPUTE = 3  # exit code
MARGIN_S = 12.0  # of --seconds: to pack and to print
MAX_FILES = 8
OF_CALL = 3  # of these: results.json, results.md, and the output of the command, which a caller may put beside them
LONGER = 1.2  # an item that ran out of time is repeated if it gets this many times its seconds
ALL_OF_IT = 0.85  # of its seconds: a failed item that took so long ran out of time
HOST_GIB = "96"  # that may be pinned: some virtual machines report little memory until it is used


@dataclasses.dataclass(frozen=True)
class Item(SuitePart):
    """An item. least_gib: memory of a GPU that it needs. per_card: a result does not hold for another kind of GPU."""

    least_gib: float = 0.0
    per_card: bool = True


def steps(case: str, most_s: float = 130.0, need_s: float = 50.0, least_gib: float = 0.0) -> Item:
    return Item(case, functools.partial(gpu_items.time_step, case), most_s, need_s, least_gib=least_gib)


def attention(name: str, kernels: Sequence[str], most_s: float, need_s: float) -> Item:
    return Item(name, functools.partial(gpu_items.check_kernels, name, kernels), most_s, need_s, per_card=False)


def tests(name: str, file: str, most_s: float, need_s: float) -> Item:
    act = functools.partial(suite.run_gpu_tests, name=name, only=(file,))
    return Item(name, act, most_s, need_s, per_card=False)


def timed_kernels(kind: str, name: str, most_s: float, need_s: float) -> Item:
    return Item(name, functools.partial(gpu_items.time_kernels, kind), most_s, need_s)


# In the order of their value. A step with a loop over layers compiles in half the time of an unrolled step.
ITEMS: tuple[Item, ...] = (
    Item("look", gpu_items.look, 40, 2),
    Item("compute", gpu_items.compute, 75, 15, gate=True),
    attention("attention of llama3", gpu_items.FIRST_KERNELS, 130, 40),
    Item("losses as on a CPU", gpu_items.compare_losses, 140, 40, per_card=False),
    Item("killed and resumed", gpu_items.kill_and_resume, 90, 40, per_card=False),
    steps("one document, loop"),
    Item("PyTorch", gpu_items.time_torch, 200, 80),
    steps("packed, loop"),
    steps("half, packed, loop", 150, 70, HALF_GIB),
    Item("rates", gpu_items.calibrate, 150, 70),
    Item("trace", functools.partial(gpu_items.trace_step, "packed, loop"), 170, 110),
    steps("fp8, packed, loop"),
    steps("packed, unrolled", 170, 70),
    steps("one document, unrolled", 170, 70),
    attention("more attention", gpu_items.MORE_KERNELS, 200, 60),
    tests("fp8 matmuls", "test_gpu_fp8.py", 80, 25),
    Item("save and restore", gpu_items.check_checkpoint, 150, 60, per_card=False),
    tests("experts", "test_gpu_experts.py", 90, 40),
    Item("cost of packing", gpu_items.compare_packing, 90, 25),
    *map(steps, ("pallas, packed, loop", "deterministic, pallas, loop")),
    steps("half, fp8, unrolled", 200, 90, HALF_GIB),
    steps("half, packed, unrolled", 200, 90, HALF_GIB),
    *map(steps, ("offload, loop", "8 segments, loop")),
    tests("attention", "test_gpu_attention.py", 240, 45),
    *map(steps, ("mixtral", "1b loop")),
    Item("a run and its receipt", gpu_items.check_gpu_metrics, 150, 60),
    Item("command line", suite.train_tiny, 150, 50, per_card=False),
    Item("preflight", gpu_items.record_preflight, 75, 30),
    timed_kernels("gemm", "gemm", 110, 30),
    timed_kernels("attention", "kernels of attention", 110, 30),
    steps("mixtral capacity"),
    *(timed_kernels(kind, kind, 60, 20) for kind in ("loss", "norm", "optimizer")),
    timed_kernels("experts", "kernels of experts", 90, 30),
)


# ---- The machine


def prepare_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Change variables in `environ` that would end all items. Return a line for each change."""
    done, site = [], Path(sysconfig.get_path("purelib"))
    roots = [Path(p) for p in (environ.get("CUDA_ROOT", ""), f"{site}/nvidia/cu13", "/usr/local/cuda", "/opt/cuda") if p]
    has_libdevice = any((root / "nvvm/libdevice/libdevice.10.bc").is_file() for root in roots)
    has_ptxas = shutil.which("ptxas", path=environ.get("PATH")) or any((root / "bin/ptxas").is_file() for root in roots)
    of_torch = site / "torch/bin/ptxas", site / "triton/backends/nvidia/lib/libdevice.10.bc"
    if not (has_libdevice and has_ptxas) and all(file.is_file() for file in of_torch):
        root = Path("/tmp/cuda_root")
        for file, name in zip(of_torch, ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"), strict=True):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).unlink(missing_ok=True)
            (root / name).symlink_to(file)
        environ["CUDA_ROOT"] = str(root)
        done.append(f"CUDA_ROOT={root}: there is no ptxas or no libdevice, and the packages torch and triton have them")
    if hardware.HOST_LIMIT not in environ:
        environ[hardware.HOST_LIMIT] = HOST_GIB
        done.append(f"{hardware.HOST_LIMIT}={HOST_GIB}")
    return done + [f"removed {name}={environ.pop(name)}" for name in refused_variables(environ)]


def refused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables in `environ` that a run refuses. Some container images set such variables."""
    return sorted({p.key for p in (*environment.refuse(environ, {}), *hardware.memory_environment(-1.0, environ)[1])})


# ---- Results of earlier calls and machines


def done_elsewhere(folder: Path | None, device: str) -> set[str]:
    """Return the items that an earlier machine has done: on a GPU of this kind, or on any if the result holds for any."""
    found: set[str] = set()
    if folder and not folder.is_dir():
        print(f"--earlier: there is no folder {folder}; every item is open", file=sys.stderr)
    for file in sorted(folder.rglob("results.json")) if folder else ():
        try:
            tree = json.loads(file.read_text())
            if tree["kind"] != "first_minutes" or tree["about"]["platform"] != "gpu":
                continue
            same, parts = tree["about"]["device"] == device, tree["parts"]
            verdicts = {name: result["verdict"] for name, result in parts.items()}
            # A speed may be off the plan. An incomplete comparison of correctness is no result.
            found |= {i.name for i in ITEMS if verdicts.get(i.name) == GOOD and (same or not i.per_card)}
            found |= {i.name for i in ITEMS if verdicts.get(i.name) == OFF and same and i.per_card}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"--earlier: {file} is not used: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def is_open(item: Item, before: Mapping[str, Any] | None, seconds: float) -> bool:
    """Return whether an item is to run in a call of `seconds`. before: its result on this machine."""
    if before is None or before["verdict"] == OUT or (item.gate and before["verdict"] == BAD):
        return True
    ran_out = before["verdict"] == LATE or (before["verdict"] == OFF and not item.per_card)
    ran_out = ran_out or (before["verdict"] == BAD and before["seconds"] > ALL_OF_IT * before["budget_s"])
    return ran_out and min(item.most_s, seconds) > LONGER * before["budget_s"]


def send(node: Node, out: Path) -> None:
    """Copy the results to `out`: the page, the JSON data, packed logs, and the largest number of kept files that is allowed."""
    out.mkdir(parents=True, exist_ok=True)
    packed = node.path / "logs.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in ("logs", "suite_run", "suite_checkpoint", gpu_items.METRICS_RUN, "recorded_node", "preflight.json"):
            if (node.path / name).exists():
                archive.add(node.path / name, name, filter=lambda info: None if info.size > 4 * 2**20 else info)
    kept = [packed, *sorted((node.path / "keep").glob("*"))]
    sent = [file for file in kept if file.stat().st_size <= MAX_FILE_BYTES][: MAX_FILES - OF_CALL]
    for file in (node.path / "results.json", node.path / "results.md", *sent):
        if file.exists():
            shutil.copy(file, out / file.name)
    if left := [file.name for file in kept if file not in sent]:
        print(f"not in {out}, and only in {node.path / 'keep'}: {', '.join(left)}", file=sys.stderr)


# ---- The command line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.first_minutes", description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results, at most eight files")
    parser.add_argument("--work", type=Path, required=True, help="a folder that a further call on this machine finds again")
    parser.add_argument("--earlier", type=Path, help="a folder with results.json files of earlier machines")
    parser.add_argument("--only", default="", help="'NAME;NAME': these items alone, done or not")
    parser.add_argument("--list", action="store_true", help="print the items that would run, and stop")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    return parser


def find_problems(args: argparse.Namespace, devices: hardware.Devices) -> list[Problem]:
    """Return the problems of this command line on these devices."""
    known, found = [item.name for item in ITEMS], []
    if [name for name in filter(None, args.only.split(";")) if name not in known]:
        found.append(Problem("--only", args.only, "no such item", f"The items are {'; '.join(known)}."))
    if not (args.smoke or args.list) and devices.kind != "gpu":
        found.append(Problem("--seconds", args.seconds, f"no GPU here ({devices.source})", "Add --smoke to run on the CPU."))
    elif not args.list and devices.problem:
        found.append(devices.problem)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the open items, and return the exit code."""
    began, args = time.monotonic(), parser().parse_args(argv)
    changes = [] if args.list or args.smoke else prepare_environment(os.environ)
    devices = hardware.probe()
    if problems := find_problems(args, devices):
        return launch.report_problems(problems)
    only = [*filter(None, args.only.split(";"))]
    elsewhere = set() if only else done_elsewhere(args.earlier, devices.name)
    items = [i for i in ITEMS if not only or i.name in only]
    items = [i for i in items if i.gate or i.name == "look" or i.name not in elsewhere]
    items = [i for i in items if args.smoke or i.least_gib <= devices.memory_gib]
    if args.list:
        print(*(f"{i.need_s:4.0f} to {i.most_s:4.0f} s  {i.name}" for i in items), sep="\n")
        return 0
    console, work, out = make_console(bench.WIDTH), *(path.expanduser().absolute() for path in (args.work, args.out))
    for line in changes:
        bench.print_line(console, line, "dim")
    results = work / "results" / "results.json"
    before: dict[str, dict[str, Any]] = json.loads(results.read_text())["parts"] if results.exists() else {}
    node = Node(str(results.parent), "", "first_minutes", args.smoke, str(work / "compiled"))
    node.devices = dataclasses.replace(devices, count=1)
    done = node.results["parts"] = {name: result for name, result in before.items() if name not in only}
    for name in ("logs", "keep"):
        (node.path / name).mkdir(parents=True, exist_ok=True)
    items = [i for i in items if is_open(i, done.get(i.name), args.seconds)]
    if args.smoke:
        items = [dataclasses.replace(i, need_s=2.0) for i in items]
    begin_background(node, [item.name for item in items])

    def after() -> None:
        try:
            send(node, out)
        except OSError as error:  # the results stay in --work, and the next item may be sent
            print(f"--out: {error}; the results are in {node.path}", file=sys.stderr)

    if not items:  # --out may be a new folder
        after()
    left_s = args.seconds - MARGIN_S - (time.monotonic() - began)
    try:
        code = node.run(lambda: run_parts(items, node, console, left_s, "The first minutes", after), "an item failed")
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; finished results are kept.", file=sys.stderr)
        return INTERRUPTED
    if any(done.get(item.name, {}).get("verdict") == BAD for item in items if item.gate):
        bench.print_line(console, "JAX cannot compute on this GPU: see `look` and `compute` in logs.tar.gz.", "bold red")
        return NO_COMPUTE
    if rest := [i.name for i in items if done.get(i.name, {}).get("verdict") in (OUT, LATE)]:
        bench.print_line(console, f"not done: {'; '.join(rest)}. The same command continues there.")
    return code


def begin_background(node: Node, names: Sequence[str]) -> None:
    """Begin the CPU's work that these items need."""
    if "losses as on a CPU" in names:
        for precision in gpu_items.precisions(node):
            act = functools.partial(gpu_items.take_losses, node, precision, "cpu", 300.0)
            background.begin(f"losses {precision}", act)
    if "PyTorch" in names:
        gpu_items.begin_examples(node)


def run_and_exit() -> None:
    """Run `main`, and end the process without waiting for the CPU's work in the background, whose children end with it."""
    code: int | str | None = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:  # Python's own exit would wait for the work
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else REFUSED)


if __name__ == "__main__":
    run_and_exit()
