"""The cost of saves and restarts: steps continue during a save, restarts are timed by part, memory and files do not grow."""

import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import runs
from faults import Faults, Figures, same, steps_written

# 85 M parameters, 1.02 GB of weights and moments. The batch is so small that a step takes half a second on two cores.
LARGE: dict[str, Any] = {
    "model__num_layers": 6,
    "model__d_model": 1024,
    "model__d_ff": 2816,
    "model__num_heads": 8,
    "model__num_kv_heads": 8,
    "model__vocab_size": 4096,
    "data__seq_len": 16,
    "train__global_batch": 1,
    "train__steps": 24,
    "checkpoint__keep": 1,
}


def test_a_save_of_a_gigabyte(tmp_path: Path, figures: Figures) -> None:
    faults = Faults(tmp_path, **LARGE)
    with_saves, without = tmp_path / "with", tmp_path / "without"
    code, said = faults.start(with_saves, checkpoint__every_steps=8, checkpoint__keep=3).end()
    assert code == 0, said
    code, said = faults.start(without, checkpoint__every_steps=0).end()
    assert code == 0, said
    assert runs.exact(with_saves) == runs.exact(without)
    assert same(runs.tensors(with_saves, 24), runs.tensors(without, 24)), "training during a save is training"
    assert runs.steps(with_saves) == [8, 16, 24]
    log = (with_saves / "log.txt").read_text()
    for step in (8, 16):  # no step runs beside the last save
        began, ended = log.index(f" step {step}/"), log.index(f"checkpoint {step}: ")
        assert re.search(rf" step {step + 1}/", log[began:ended]), "the loop waited for the whole save"
    first, save, _ = saves_in(with_saves)
    share = {name: round(save[name] / save["total_s"], 4) for name in ("blocked_s", "copied_s")}
    figures.add("save", **{k: round(v, 3) for k, v in save.items()}, share=share, first=first)


def saves_in(workdir: Path) -> list[dict[str, float]]:
    """Return step, size, times, GB/s and host memory of every save in log.txt."""
    found = []
    pattern = (
        r"checkpoint (\d+): ([\d,.]+) MiB in ([\d.]+) s \(([\d.]+) GB/s\); "
        r"the loop waited ([\d.]+) s, copies took ([\d.]+) s, host memory at most ([\d.]+) GiB"
    )
    for step, mib, total, rate, blocked, copied, host in re.findall(pattern, (workdir / "log.txt").read_text()):
        numbers = {"mib": mib.replace(",", ""), "total_s": total, "gb_per_s": rate, "host_gib": host}
        numbers |= {"blocked_s": blocked, "copied_s": copied}
        found.append({"step": int(step), **{name: float(text) for name, text in numbers.items()}})
    return found


def test_from_a_kill_to_the_next_step(tmp_path: Path, figures: Figures) -> None:
    faults = Faults(tmp_path, train__steps=100_000, data__source="stdlib", log__every_steps=1)
    workdir = tmp_path / "run"
    child = faults.start(workdir)
    child.until(lambda: 10 in runs.steps(workdir))
    child.process.kill()
    killed = time.time()
    child.end()
    resumed = max(runs.steps(workdir))
    child = faults.start(workdir)
    child.until(lambda: "first step " in child.said)
    took = time.time() - killed
    child.until(lambda: "start_s" in runs.receipt(workdir))
    child.process.kill()
    parts = runs.receipt(workdir)["start_s"]
    assert list(parts) == ["launch", "open", "compile", "restore", "data", "step"]
    assert runs.receipt(workdir)["resumed_from_step"] == resumed
    figures.add("restart", seconds=round(took, 1), **{name: round(s, 2) for name, s in parts.items()})


def test_nothing_grows(tmp_path: Path, figures: Figures) -> None:
    """From step 1500 on, memory grows by less than 2%, and open files do not grow. Earlier steps fill caches."""
    steps, settled = 5000, 1500
    often: dict[str, Any] = {"eval__every_steps": 50, "eval__sequences": 1}
    often |= {"checkpoint__every_steps": 50, "checkpoint__keep": 2}
    faults = Faults(tmp_path, train__steps=steps, log__every_steps=10, data__source="stdlib", **often)
    workdir = tmp_path / "run"
    child = faults.start(workdir)
    proc, seen = Path(f"/proc/{child.process.pid}"), []
    while child.process.poll() is None:
        at = steps_written(workdir)
        if not seen or at >= seen[-1][0] + 50:
            try:
                memory = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                seen.append((at, memory, len(list((proc / "fd").iterdir()))))
            except OSError:
                break
        time.sleep(0.02)
    code, said = child.end()
    assert code == 0, said
    late = [entry for entry in seen if entry[0] >= settled]
    first, last = late[: len(late) // 3], late[-(len(late) // 3) :]
    # The least of each part: a save that runs meanwhile holds copies of the state and open files.
    memory = min(m for _, m, _ in last) / min(m for _, m, _ in first)
    files = (min(f for *_, f in first), min(f for *_, f in last))
    times = [line["step_time_s"] for line in runs.lines(workdir) if line["kind"] == "train" and line["step"] >= settled]
    times = [t for t in times if t]
    slower = statistics.median(times[-len(times) // 3 :]) / statistics.median(times[: len(times) // 3])
    figures.add("soak", steps=steps, memory=round(memory, 4), open_files=files, step_time=round(slower, 3))
    assert memory < 1.02
    assert files[1] <= files[0]
