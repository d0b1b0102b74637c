"""What a run writes, shows and leaves behind: metrics, TensorBoard events, messages, traces, signals, receipts."""

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import events

from jaxtrain import metrics, profiling, progress, receipt
from jaxtrain.config import Profile
from jaxtrain.throughput import Throughput, memory
from jaxtrain.trackers.tensorboard import SUFFIX, TensorBoard

REPO = Path(__file__).parents[2]


def train_line(step: int, **changes):
    """Every field a caller gives for a train line."""
    line = dict.fromkeys(metrics.TRAIN_KEYS[1:-1], 0.5) | {"step": step, "tokens": 100 * step, "skipped_steps": 0}
    return line | changes


# metrics.jsonl and tb/


def test_lines_have_the_documented_keys_and_every_digit(tmp_path):
    loss = np.float32(0.1)
    with metrics.Writers(tmp_path) as writers:
        writers.train(**train_line(1, loss=jnp.float32(0.1), grad_norm=loss, lr=1 / 3, mfu_full=None, tokens=np.int64(7)))
        writers.eval(step=1, loss=2.5, bits_per_byte=None, perplexity=12.25)
        train, evaluation = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before closing: each line is flushed
    assert tuple(json.loads(train)) == metrics.TRAIN_KEYS
    assert tuple(json.loads(evaluation)) == metrics.EVAL_KEYS
    train = json.loads(train)
    assert train["loss"] == train["grad_norm"] == float(loss) != 0.1
    assert np.float32(train["loss"]) == loss
    assert train["lr"] == 1 / 3
    assert train["mfu_full"] is None
    assert train["tokens"] == 7 and isinstance(train["tokens"], int)
    assert json.loads(evaluation) == {"kind": "eval", "step": 1, "loss": 2.5, "bits_per_byte": None, "perplexity": 12.25}
    assert not (tmp_path / "tb").exists()


def test_nonfinite_values_are_valid_json_and_read_back(tmp_path):
    with metrics.Writers(tmp_path) as writers:
        writers.train(**train_line(1, loss=np.float32("nan"), grad_norm=float("-inf")))
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None and line["grad_norm"] is None
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"}
    (back,) = metrics.read(tmp_path / "metrics.jsonl")
    assert math.isnan(back["loss"]) and back["grad_norm"] == -math.inf and "nonfinite" not in back


def test_wrong_fields_are_refused(tmp_path):
    writers = metrics.Writers(tmp_path)
    line = train_line(1)
    del line["loss"]
    with pytest.raises(TypeError, match=r"lacks \['loss'\] and has unknown \['los'\]"):
        writers.train(**line, los=1.0)
    with pytest.raises(TypeError, match="shape"):
        writers.train(**train_line(1, loss=np.zeros(2)))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rewind_forgets_later_steps_in_both_places(tmp_path):
    for attempt in range(2):
        with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
            if attempt:
                before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
                (tmp_path / "tb" / "events.out.tfevents.1.mine").write_bytes(b"")  # another program's stays
                assert writers.rewind(4) == metrics.Rewound(kept=5, dropped=3, cut=False)
                assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:5])
            for step in range(1 + 4 * attempt, 7):
                writers.train(**train_line(step, loss=step + 10.0 * attempt))
                if step in (2, 6):
                    writers.eval(step=step, loss=9.0, bits_per_byte=3.0, perplexity=7.0)
    lines = [(line["kind"], line["step"], line["loss"]) for line in metrics.read(tmp_path / "metrics.jsonl")]
    assert lines == [("train", 1, 1.0), ("train", 2, 2.0), ("eval", 2, 9.0), ("train", 3, 3.0), ("train", 4, 4.0),
                     ("train", 5, 15.0), ("train", 6, 16.0), ("eval", 6, 9.0)]  # fmt: skip
    found, restarts = events(tmp_path / "tb")
    assert [(step, v.get("train/loss", v.get("eval/loss"))) for step, _, v in found] == [line[1:] for line in lines]
    assert restarts == 1
    assert found[0][2]["train/tokens_per_s"] == 0.5 and found[2][2] == {
        "eval/loss": 9.0,
        "eval/bits_per_byte": 3.0,
        "eval/perplexity": 7.0,
    }
    times = [line.get("time_unix") for line in metrics.read(tmp_path / "metrics.jsonl")]
    assert found[0][1] == times[0] and found[2][1] == times[1] and found[3][1] == times[3]
    assert (tmp_path / "tb" / "events.out.tfevents.1.mine").exists()
    assert not list(tmp_path.glob(".*"))
    for _ in range(3):  # as often as it is resumed: the file in use and one emptied, which an open TensorBoard may still read
        with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
            writers.rewind(6)
        sizes = [path.stat().st_size for path in sorted((tmp_path / "tb").glob(f"*{SUFFIX}*"))]
        assert len(sizes) == 2 and sizes[0] == 0 < sizes[1]
    assert [step for step, _, _ in events(tmp_path / "tb")[0]] == [line[1] for line in lines]


def test_events_lost_in_a_kill_come_back(tmp_path):
    script = f"""
import os
from jaxtrain import metrics
from jaxtrain.trackers.tensorboard import TensorBoard
line = dict.fromkeys(metrics.TRAIN_KEYS[1:-1], 0.5)
writers = metrics.Writers({str(tmp_path)!r}, [TensorBoard({str(tmp_path)!r})])
for step in range(1, 6):
    writers.train(**line | dict(step=step))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=REPO).returncode == -9
    assert len(list(metrics.read(tmp_path / "metrics.jsonl"))) == 5
    assert events(tmp_path / "tb")[0] == []  # the kill took them
    with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
        writers.rewind(3)
    assert [step for step, _, _ in events(tmp_path / "tb")[0]] == [1, 2, 3]


def test_a_cut_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writers = metrics.Writers(tmp_path)
    for step in (1, 2, 3):
        writers.train(**train_line(step))
    writers.close()
    whole = path.read_bytes()
    for cut in (1, 20, len(whole.splitlines()[-1]) - 1):  # even when only the end of line is missing
        path.write_bytes(whole[:-cut])
        assert [line["step"] for line in metrics.read(path)] == [1, 2]
        assert writers.rewind(3) == metrics.Rewound(kept=2, dropped=0, cut=True)
        path.write_bytes(whole[:-cut])
        writers.train(**train_line(3))  # without a rewind: not glued to the rest of the old line
        writers.close()
        assert [line["step"] for line in metrics.read(path)] == [1, 2, 3]
    path.write_bytes(whole.replace(b'"step": 2', b'"step": ', 1))
    with pytest.raises(metrics.MetricsError, match=r"metrics.jsonl:2: .*Repair or delete"):
        writers.rewind(3)
    assert len(path.read_bytes().splitlines()) == 3 and not list(tmp_path.glob(".*"))


def test_rewind_to_nothing_and_other_processes(tmp_path):
    writers = metrics.Writers(tmp_path / "a", [TensorBoard(tmp_path / "a")])
    assert writers.rewind(-1) == metrics.Rewound(0, 0, False)
    writers.train(**train_line(0))
    assert writers.rewind(-1) == metrics.Rewound(0, 1, False)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == "" and events(tmp_path / "a" / "tb") == ([], 0)
    other = metrics.Writers(tmp_path / "b", [TensorBoard(tmp_path / "b")], process_index=1)
    other.train(**train_line(1))
    other.rewind(0)
    assert not (tmp_path / "b").exists()


# rates and memory


def run_loop(throughput, now, *, steps, device_s, data_s=0.0, halt_after=(), halt_s=0.0, save_after=(), copies_s=0.0):
    """The trainer's loop against a simulated device: step i is queued, then the result of step i - 1 is waited for."""
    done = [0.0]  # when the device finishes each step, the first being none
    for i in range(steps):
        throughput.start_step()
        with throughput.waiting_for_data():
            now[0] += data_s
        done.append(max(done[-1], now[0]) + device_s)
        now[0] = max(now[0], done[-2])
        if i in halt_after:
            now[0] = max(now[0], done[-1]) + halt_s  # an evaluation waits for everything queued
            throughput.exclude()
        if i in save_after:  # the newest metrics are read, then the device copies the state: the loop goes on
            now[0] = max(now[0], done[-1])
            done[-1] += copies_s
            throughput.exclude(more=1)
    throughput.start_step()


def make_throughput(now, **changes):
    known: dict[str, Any] = {"tokens_per_step": 8000, "num_devices": 4, "flops_causal": 5e9, "flops_full": 6e9}
    known |= {"flops_hardware": 7e9, "peak_flops": 1e14}
    return Throughput(**known | changes, clock=lambda: now[0])


def test_throughput_is_that_of_the_device():
    now = [0.0]
    throughput = make_throughput(now)
    run_loop(throughput, now, steps=10, device_s=0.5, data_s=0.125)
    line = throughput.line()
    assert line == {
        "step_time_s": 0.5, "data_wait_s": 0.125, "tokens_per_s": 16000.0, "tokens_per_s_per_device": 4000.0,
        "tflops_per_device": 20.0, "mfu_causal": 0.2, "mfu_full": 0.24, "hfu": 0.28,
    }  # fmt: skip
    assert tuple(line) == metrics.TRAIN_KEYS[7:15]
    assert set(throughput.line().values()) == {None}  # no step since
    now[0] += 2.0
    throughput.start_step()
    assert throughput.line()["step_time_s"] == 2.0  # each line has its own mean


@pytest.mark.parametrize("data_s", [0.0, 2.0])  # the device is the limit, or the data is
def test_halts_and_warm_up_do_not_count(data_s):
    now = [0.0]
    throughput = make_throughput(now)
    throughput.start_step()
    now[0] += 60.0  # the first step compiles
    run_loop(throughput, now, steps=12, device_s=0.5, data_s=data_s, halt_after=(4, 8), halt_s=30.0)
    line = throughput.line()
    assert line["step_time_s"] == pytest.approx(max(0.5, data_s))
    assert line["data_wait_s"] == pytest.approx(data_s)


def test_copies_for_a_save_do_not_count():
    now = [0.0]
    throughput = make_throughput(now)
    run_loop(throughput, now, steps=16, device_s=0.5, save_after=(4, 9), copies_s=3.0)
    assert throughput.line()["step_time_s"] == pytest.approx(0.5)


def test_unknown_peak_gives_no_utilisation():
    now = [0.0]
    throughput = make_throughput(now, peak_flops=0.0, flops_hardware=None)
    run_loop(throughput, now, steps=5, device_s=1.0)
    line = throughput.line()
    assert line["tflops_per_device"] == 10.0
    assert line["mfu_causal"] is None and line["mfu_full"] is None and line["hfu"] is None


class FakeDevice:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_memory_is_that_of_the_fullest_device():
    gib = 2**30
    devices = [FakeDevice({"bytes_in_use": n * gib, "peak_bytes_in_use": (9 - n) * gib}) for n in (2, 3)]
    assert memory(devices) == (3.0, 7.0)
    assert memory(jax.local_devices()) == (None, None)  # CPUs do not tell


# messages


def test_plain_lines_and_log(tmp_path):
    out = io.StringIO()
    line = train_line(10, loss=2.34567, tokens_per_s=12345.6, mfu_causal=0.451, peak_memory_gib=70.26, step_time_s=2.0)
    for _ in range(2):  # the second appends
        with progress.Console(tmp_path, 0, 100, stream=out) as console:
            console.say("[bold]not markup[/bold] 100%d")
            console.tick(9)
            console.step(line)
            console.warn("careful")
    shown = "step 10/100  loss 2.3457  left 3m00s  12,346 tok/s  MFU 45.1% (causal)  mem 70.3 GiB"
    assert out.getvalue().splitlines() == ["[bold]not markup[/bold] 100%d", shown, "warning: careful"] * 2
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 6 and log[1].endswith(" " + shown) and log[2].endswith("WARNING careful")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ", text) for text in log)
    unknown = progress.numbers(train_line(1, tokens_per_s=None, mfu_causal=None, peak_memory_gib=None), None)
    assert unknown == "loss 0.5000  left -  - tok/s  MFU -  mem -"
    eight = progress.numbers(train_line(1, mfu_causal=1.02), None, of_fp8=0.5)
    assert "MFU 102.0% (causal, 51.0% of the FP8 peak)" in eight
    assert [progress.duration(s) for s in (0.4, 59.6, 3600, 200000)] == ["0s", "1m00s", "1h00m", "2d07h"]


def test_other_processes_log_apart_and_warn_aloud(tmp_path):
    out = io.StringIO()
    with progress.Console(tmp_path, 3, 100, stream=out) as console:
        console.say("quiet")
        console.warn("loud")
    assert out.getvalue() == "warning: [process 3] loud\n"
    assert len((tmp_path / "log.3.txt").read_text().splitlines()) == 2 and not (tmp_path / "log.txt").exists()


def test_errors_and_foreign_warnings_are_in_the_log(tmp_path):
    import logging

    out = io.StringIO()
    with pytest.raises(RuntimeError, match="went wrong"), progress.Console(tmp_path, 0, 10, stream=out):
        logging.getLogger("some.library").warning("look at this")
        raise RuntimeError("it went wrong")
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING look at this" in log and "Traceback" in log and log.endswith("RuntimeError: it went wrong\n")
    assert out.getvalue() == ""  # Python and the library's own handlers tell the terminal


def test_the_run_outlives_its_terminal(tmp_path):
    script = f"""
from jaxtrain import progress
with progress.Console({str(tmp_path)!r}, 0, 10) as console:
    console.say("one")
    console.say("two")
raise SystemExit(75)
"""
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has seen enough
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (75, "")
    log = (tmp_path / "log.txt").read_text()
    assert log.count(" one\n") == 1 and log.count(" two\n") == 1 and log.count("cannot be written to") == 1


@pytest.mark.parametrize("columns", [120, 80])
def test_live_line_on_a_terminal(tmp_path, columns):
    """A real pseudo-terminal: one line is redrawn, messages stand above it, and a kill leaves the cursor visible."""
    script = f"""
import os
from jaxtrain import metrics, progress
line = dict.fromkeys(metrics.TRAIN_KEYS[1:-1], 0.5)
with progress.Console({str(tmp_path)!r}, 0, 40) as console:
    console.say("compiling")
    for step in range(1, 21):
        console.tick(step)
        if step % 10 == 0:
            console.step(line | dict(step=step, loss=step / 3))
    console.say("message [10] above")
    os._exit(9)
"""
    main, side = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stdout=side, stderr=side, stdin=side, env=environ)
    os.close(side)
    seen = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # how Linux ends a pseudo-terminal
            break
        if not chunk:
            break
        seen += chunk
    os.close(main)
    assert child.wait(10) == 9
    text = seen.decode()
    assert "compiling" in text and "20/40" in text and "loss 6.6667" in text and "message [10] above" in text
    assert ("━" in text) == (columns == 120) and "GiB" in text[text.rindex("20/40") :]
    assert text.rindex("message [10] above") < text.rindex("20/40")  # the live line is drawn again below
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert "loss 3.3333" in (tmp_path / "log.txt").read_text()


# signals


LOOP = """
import sys, time
from jaxtrain.signals import Stop
with Stop() as stop:
    print("ready", flush=True)
    BODY
print(stop.reason, stop.exit_code, flush=True)
sys.exit(stop.exit_code)
"""
POLL = "while not stop: time.sleep(0.01)"
# A lock that deadlocks in C: no signal ends the call and no Python handler runs, as in a long compile or a hung collective.
STUCK = "import ctypes; lib = ctypes.CDLL(None); lock = bytes(64); lib.pthread_mutex_lock(lock); lib.pthread_mutex_lock(lock)"


def start_loop(body: str) -> subprocess.Popen:
    code = LOOP.replace("BODY", body)
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 75, "SIGTERM"), (signal.SIGUSR1, 75, "SIGUSR1")],
)
def test_first_signal_ends_in_good_order(number, code, name):
    child = start_loop(POLL)
    child.send_signal(number)
    child.send_signal(number)  # at once: the same Ctrl-C through another road
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out) == (code, f"{number.name} {code}\n")
    assert err == f"\n{name}: finishing this step, then saving. Again to leave at once.\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_second_signal_leaves_at_once_even_when_stuck(number, code):
    child = start_loop(STUCK)
    child.send_signal(signal.SIGUSR1)
    time.sleep(0.4)
    assert child.poll() is None
    child.send_signal(number)
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out) == (code, "") and f"{number.name} again: leaving at once" in err


@pytest.mark.parametrize("body", [POLL, STUCK], ids=["between steps", "stuck in C"])
def test_asking_for_traces_ends_nothing(body):
    """Each is heard, and an end that is asked for afterwards is the first one."""
    child = start_loop(body)
    assert child.stderr is not None
    for _ in range(3):
        child.send_signal(signal.SIGUSR2)
        assert [child.stderr.readline() for _ in range(2)] == ["\n", "SIGUSR2: a trace was asked for.\n"]
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert [child.stderr.readline() for _ in range(2)][1].startswith("SIGTERM: finishing this step, then saving.")
    if body == STUCK:
        time.sleep(0.4)
        child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=10) == 75


def test_handlers_come_back():
    from jaxtrain.signals import Stop

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with Stop(signals=(signal.SIGINT, signal.SIGUSR1)) as stop:
        assert signal.getsignal(signal.SIGTERM) == before[1] and signal.getsignal(signal.SIGINT) != before[0]
        assert not stop and stop.exit_code is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


# traces


def traced_loop(tmp_path, profile: Profile, first: int, last: int) -> list[str]:
    said: list[str] = []
    tracer = profiling.Tracer(profile, tmp_path, said.append)
    step_fn = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((64, 64))
    for step in range(first, last + 1):
        tracer.before_step(step)
        x = step_fn(x)
        tracer.after_step(step, x)
    tracer.close(x)
    return said


@pytest.mark.parametrize(("last", "traced"), [(7, {3, 4}), (3, {3})])  # the whole window; a run that ends inside it
def test_trace_holds_the_steps_asked_for(tmp_path, last, traced):
    said = traced_loop(tmp_path, Profile(start=3, steps=2), 1, last)
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert said[0] == "Tracing steps 3 to 4." and len(said) == 2
    assert str(path) in said[1] and f"python -m jaxtrain.profile {tmp_path}" in said[1]
    assert list(path.parent.glob("*.trace.json.gz"))
    data = jax.profiler.ProfileData.from_file(str(path))
    found = {
        dict(event.stats)["step_num"]
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == profiling.TRACE_NAME
    }
    assert {int(number) for number in found} == traced


def test_each_request_is_a_trace_of_the_next_steps(tmp_path):
    """Two that come during a trace are one more after it; one trace more, and the text of the program beside each."""
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    said, asked = [], {2: 1, 3: 3, 9: 4}
    now = [0]
    tracer = profiling.Tracer(Profile(steps=2), tmp_path, said.append, asked=lambda: now[0], program=compiled)
    for step in range(12):
        tracer.before_step(step)
        now[0] = asked.get(step, now[0])
        tracer.after_step(step, jnp.ones(3))
    tracer.close()
    assert [line for line in said if line.startswith("Tracing")] == [
        *("Tracing steps 3 to 4.", "Tracing steps 5 to 6.", "Tracing steps 10 to 11.")
    ]
    texts = list(tmp_path.glob(f"profile/plugins/profile/*/{profiling.HLO_TEXT}"))
    assert len(texts) == len(list(tmp_path.rglob("*.xplane.pb"))) == 3 and "ENTRY" in texts[0].read_text()


@pytest.mark.parametrize(
    ("steps", "process", "words"),
    [(0, 0, "No trace: profile.steps = 0."), (2, 1, "No trace by this process: process 0 takes it")],
)
def test_a_request_that_cannot_be_met_is_answered(tmp_path, steps, process, words):
    said: list[str] = []
    tracer = profiling.Tracer(Profile(steps=steps), tmp_path, said.append, process_index=process, asked=lambda: 1)
    for step in range(3):
        tracer.before_step(step)
        tracer.after_step(step, None)
    assert len(said) == 1 and said[0].startswith(words) and not (tmp_path / "profile").exists()


def test_a_trace_of_cuda_graphs_says_that_names_may_be_missing(tmp_path):
    said: list[str] = []
    tracer = profiling.Tracer(Profile(steps=1), tmp_path, said.append, asked=lambda: 1, graphs=True)
    tracer.before_step(0)
    tracer.after_step(0, None)
    (told,) = [line for line in said if "CUDA graphs" in line]
    assert "profile.start above 0" in told


def test_no_trace_behind_the_window_or_when_off(tmp_path):
    assert traced_loop(tmp_path, Profile(start=3, steps=2), 10, 12) == [
        "No trace: this run starts at step 10, behind profile.start=3."
    ]
    assert traced_loop(tmp_path, Profile(), 1, 3) == []
    assert not (tmp_path / "profile").exists()


def test_dump_hlo(tmp_path):
    said: list[str] = []
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    path = profiling.dump_hlo(compiled, tmp_path, said.append)
    assert path == tmp_path / "profile" / "train_step.hlo.txt" and "ENTRY" in path.read_text() and str(path) in said[0]


# receipts


def test_receipt_keeps_every_attempt(tmp_path):
    path = tmp_path / "receipt.json"
    ids = []
    for attempt in range(3):
        slip = receipt.Receipt(tmp_path)
        facts = receipt.device_facts(jax.devices())
        slip.start({"config": "tiny", "config_sha256": receipt.config_sha256({"b": 1, "a": 2}), "devices": facts})
        ids.append(slip.id)
        at_start = receipt.load(path)
        assert at_start["exit_code"] is None and at_start["id"] == slip.id
        slip.update(synthetic=True)
        if attempt != 1:  # the second is killed
            slip.finish(75, "SIGTERM", {"last_step": 10 * attempt})
    last = receipt.load(path)
    assert [last["attempt"], last["exit_code"], last["reason"], last["last_step"]] == [3, 75, "SIGTERM", 20]
    assert [a["id"] for a in last["attempts"]] + [last["id"]] == ids
    assert [a["exit_code"] for a in last["attempts"]] == [75, None] and all(a["synthetic"] for a in last["attempts"])
    assert not any("attempts" in a for a in last["attempts"])
    assert last["packages"]["jax"] == jax.__version__ and last["python"] in sys.version
    assert last["devices"]["count"] == jax.device_count() and last["devices"]["platform"] == ["cpu"]
    assert last["config_sha256"] == receipt.config_sha256({"a": 2, "b": 1}) != receipt.config_sha256({"a": 2, "b": 2})
    with pytest.raises(ValueError, match="packages"):
        receipt.Receipt(tmp_path / "other").start({"packages": {}})


def test_receipt_that_cannot_be_read_is_not_overwritten(tmp_path):
    path = tmp_path / "receipt.json"
    for text, said in [("{", "not a receipt"), ('{"format": 99, "attempts": []}', "format 99"), ("[]", "not a receipt")]:
        path.write_text(text)
        with pytest.raises(receipt.ReceiptError, match=said):
            receipt.Receipt(tmp_path).start({})
        assert path.read_text() == text


def test_environment_without_secrets():
    variables = {"XLA_FLAGS": "--a", "NCCL_DEBUG": "INFO", "JAX_PLATFORMS": "cpu", "HOME": "/h", "HF_TOKEN": "t",
                 "JAX_SOME_TOKEN": "t", "SLURM_JOB_ID": "7", "SLURM_JWT": "t", "AWS_SECRET_ACCESS_KEY": "s"}  # fmt: skip
    assert set(receipt.environment(variables)) == {"XLA_FLAGS", "NCCL_DEBUG", "JAX_PLATFORMS", "SLURM_JOB_ID"}


def test_git_state(tmp_path, monkeypatch):
    def git(*args):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert receipt.git_state(tmp_path) is None
    git("init", "-q")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "readme").write_text("a")
    git("add", "readme")
    git("commit", "-qm", "one")
    assert receipt.git_state(package) is None  # in the checkout, but not of it
    git("add", ".")
    git("commit", "-qm", "two")
    assert receipt.git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("x = 1")
    assert receipt.git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    state = receipt.git_state(package)
    assert state is not None and "git" in state["error"]


# imports


def test_importing_these_is_light():
    names = ("metrics", "progress", "receipt", "signals")
    heavy = ("jax", "numpy", "rich", "tensorboardX")
    code = f"import sys, jaxtrain.{', jaxtrain.'.join(names)}\nprint([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"
