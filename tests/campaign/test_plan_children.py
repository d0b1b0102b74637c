"""Plans in child processes: failures; and a search, a remat policy that fits, and a table of models that fit, by XLA:GPU."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_plans import flat, load, tiny
from rich.console import Console

from benchmarks import what_fits
from benchmarks.studies import Model
from jaxtrain.config import Problem, RunConfig
from jaxtrain.plan import __main__ as command
from jaxtrain.plan import topology
from jaxtrain.plan.report import search_report
from jaxtrain.plan.search import parallel, search, space
from jaxtrain.plan.search.bound import mesh_sizes
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.parallel import Request

ONE = topology.parse("h200:1")


@pytest.fixture
def children(monkeypatch):
    """Put tests/ on PYTHONPATH, so that child processes can import made_plans."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


def request(accum: int = 1) -> Request:
    run = load("train.global_batch=32", f"train.grad_accum={accum}", file="configs/tiny.py")
    return Request(run, ONE, "tiny")


def test_children_that_go_wrong_are_named_and_the_rest_goes_on(children, tmp_path):
    requests, kept, heard = {a: request(a) for a in (1, 2, 4, 32)}, Cache(tmp_path), []
    found = parallel.plan_many(
        requests, jobs=2, cache=kept, plan_one="made_plans:by_accum", on_done=lambda ident, outcome: heard.append(ident)
    )
    assert [found[a].kind for a in requests] == ["planned", "failed", "crashed", "planned"] and sorted(heard) == [1, 2, 4, 32]
    assert found[2].reason == "ValueError: no plan of two microbatches" and "SIGSEGV" in found[4].reason
    assert found[32].plan.time.step_ms == pytest.approx(1000 / 32) and found[32].plan.config == "tiny"
    # A planning error would occur again, so it is cached. A crash may be chance.
    again = {a: kept.get(requests[a], "made_plans:by_accum") for a in requests}
    assert [a for a in requests if again[a]] == [1, 2, 32]
    assert again[1].plan == found[1].plan and "to try again" in again[2].reason


def test_a_child_that_takes_too_long_is_stopped(children):
    found = parallel.plan_many({8: request(8)}, jobs=1, plan_one="made_plans:by_accum", timeout_s=2.0)
    assert found[8].kind == "out of time" and "within 2 s" in found[8].reason


def test_a_child_that_the_system_kills_ran_out_of_memory(children):
    found = parallel.plan_many({0: request()}, plan_one="made_plans:killed")
    assert found[0].kind == "out of memory" and "killed, as the system does" in found[0].reason


def test_budget_stops_children(children):
    found = parallel.plan_many({i: request() for i in range(3)}, jobs=2, budget_s=1.0, plan_one="made_plans:sleeps")
    assert {o.kind for o in found.values()} == {"stopped"} and "budget of 1 s" in found[0].reason


def test_no_child_outlives_an_interrupt(children, monkeypatch):
    started = []
    popen = parallel.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    def press(running):
        if len(started) == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(parallel.subprocess, "Popen", start)
    monkeypatch.setattr(parallel, "_wait", press)
    with pytest.raises(KeyboardInterrupt):
        parallel.plan_many({i: request() for i in range(3)}, jobs=2, plan_one="made_plans:sleeps")
    assert len(started) == 2 and all(process.poll() == -signal.SIGKILL for process in started)


def test_an_interrupt_while_a_child_starts_leaves_none(children, monkeypatch):
    started = []
    popen = parallel.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(parallel.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        parallel.plan_many({0: request()}, plan_one="made_plans:sleeps")
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_whose_parent_has_ended_does_not_work(tmp_path):
    command = [sys.executable, "-c", parallel.BEGIN, str(tmp_path), str(os.getppid())]  # not the id of this process
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")  # a real parent would miss the file `request`


# ---- With XLA


def only(run: RunConfig, machine: topology.Topology, keys: set[str]) -> space.Check:
    """Return a check that refuses changes of keys other than `keys`, so that few layouts are compiled."""
    legal = space.training_check(machine)
    own = flat(run) | {f"mesh.{axis}": size for axis, size in mesh_sizes(run, machine).items()}

    def check(r: RunConfig) -> list[Problem]:
        changed = {key for key, value in flat(r).items() if value not in (own[key], flat(run)[key])}
        return [Problem(key, None, "left out in this test", "") for key in changed - keys] or list(legal(r))

    return check


def test_a_real_search(tmp_path):
    """Two layouts of a small model on two H200s are compiled in two processes, then read from the cache."""
    run, machine, kept = tiny(), topology.parse("h200:2"), Cache(tmp_path)
    check = only(run, machine, {"remat.policy"})
    console = Console(record=True, width=160)
    with search_report.watch(console) as progress:
        result = search.search(run, "tiny", machine, check=check, jobs=2, cache=kept, on_progress=progress)
    assert [c.outcome.kind for c in result.tried] == ["planned"] * 2, [c.outcome for c in result.tried]
    assert result.ended == "complete" and result.best.fits
    for c in result.tried:
        assert c.plan.time.step_ms >= c.bound.step_s * 1e3 and c.plan.memory.peak_gib >= c.bound.memory_gib
        assert c.plan.config == "tiny" and c.plan.mesh["fsdp"] == 2
    assert "2: fsdp=2" in console.export_text()
    again = search.search(run, "tiny", machine, check=check, jobs=2, cache=kept)
    assert [c.outcome.kind for c in again.tried] == ["cached"] * 2
    assert again.best.plan == result.best.plan


def test_a_model_that_does_not_fit_is_made_to(tmp_path):
    """If the step with all activations saved exceeds the usable memory, the search finds a remat policy that fits."""
    machine = topology.parse("h100:1")
    small = ("model.num_layers=4", "data.seq_len=4096", "train.global_batch=1", "loss.chunk=2048", "data.packing=none")
    run, kept = tiny(*small, "train.memory_fraction=0.002", "remat.policy=none"), Cache(tmp_path)
    plan = parallel.plan_many({0: Request(run, machine, "tiny")}, cache=kept)[0].plan
    assert plan and not plan.fits
    check = only(run, machine, {"remat.policy", "remat.every"})
    found = search.search(run, "tiny", machine, "fit", check=check, own=plan, cache=kept, jobs=1)
    assert found.ended == "found" and found.best.fits and found.best.plan.overrides == found.best.changes
    assert found.best.plan.memory.taken_gib < plan.memory.usable_gib < plan.memory.taken_gib


def test_a_table_of_what_fits_is_compiled_and_made_again_from_the_cache(monkeypatch, tmp_path, capsys):
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512, "vocab_size": 1024}
    asked = ((Model("small", sizes, 256, "made up"),), ("h200:1", "h200:2"))
    page = what_fits.page(what_fits.fill_all(*asked, jobs=2, cache=Cache(tmp_path / "plans")))
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page if line[:1] == "|"]
    assert [line[0] for line in lines] == ["GPUs", "---", "h200:1", "h200:2"]
    assert all(all(line) and len(line) == len(what_fits.HEADINGS) for line in lines)
    assert lines[2][1].startswith("one GPU; keep ") and lines[3][1].startswith("fsdp=2; ")
    assert lines[2][-1] == "100.0%" and float(lines[3][-1].rstrip("%")) != 100
    assert what_fits.COMMAND in page and "small on h200:2: fsdp=2" in capsys.readouterr().out

    def start(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(parallel, "Child", start)
    assert what_fits.page(what_fits.fill_all(*asked, jobs=2, cache=Cache(tmp_path / "plans"))) == page


SMALL = (
    "--config=configs/llama3_1b.py",
    "--config.model.num_layers=2",
    "--config.model.vocab_size=1024",
    "--config.data.seq_len=1024",
    "--config.train.global_batch=8",
    "--config.train.grad_accum=1",
)


@pytest.mark.parametrize("asked", [("--search", "--most=2"), ("--why",)], ids=" ".join)
def test_ctrl_c_among_many_plans_tells_what_there_is(asked, monkeypatch, tmp_path, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    # The command sets these variables; monkeypatch restores them for later tests.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def interrupted(running):
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "_wait", interrupted)
    argv = [*SMALL, "--topology=h200:8", "--config.dtypes.m=bf16", *asked, f"--cache={tmp_path}"]
    assert command.main(argv) == command.INTERRUPTED
    printed = capsys.readouterr().out
    assert "interrupted" in printed and ("by formula, not compiled" in printed) == ("--search" in asked)
