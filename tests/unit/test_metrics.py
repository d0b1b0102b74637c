"""The output of a run: metrics, TensorBoard events, samples, rates, messages; also signals, and which steps are traced."""

import contextlib
import io
import json
import logging
import math
import re
import resource
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_runs import gpu_line, line, train_line
from pages import curves_of
from runs import events

from jaxtrain.config import shapes
from jaxtrain.config.ramp import Ramp
from jaxtrain.config.schema import Profile
from jaxtrain.metrics import files, profiling, progress, samples, table
from jaxtrain.metrics.samples import TextSample
from jaxtrain.metrics.tensorboard import TensorBoard
from jaxtrain.metrics.throughput import Throughput, memory_gib
from jaxtrain.report import run_page
from jaxtrain.report.run import read_run
from jaxtrain.train.step_log import PendingMetrics

# ---- metrics.jsonl, metrics.N.jsonl, samples.txt and tb/


def test_lines_have_the_documented_keys_and_every_digit(tmp_path):
    loss = np.float32(0.1)
    with files.Writers(tmp_path) as writers:
        writers.train(**train_line(1, loss=jnp.float32(0.1), grad_norm=loss, lr=1 / 3, mfu_full=None, tokens=np.int64(7)))
        writers.eval(step=1, loss=2.5, bits_per_byte=None, perplexity=12.25)
        writers.eval(step=1, loss=2.0, bits_per_byte=None, perplexity=12.25, cross_entropy=2.5)
        # before the file is closed: each line is flushed
        train, evaluation, own = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert tuple(train) == ("kind", "step", *table.required_names(), "time_unix")
    assert train["loss"] == train["grad_norm"] == float(loss) != 0.1 and np.float32(train["loss"]) == loss
    assert train["lr"] == 1 / 3 and train["mfu_full"] is None
    assert train["tokens"] == 7 and isinstance(train["tokens"], int)
    assert evaluation == {"kind": "eval", "step": 1, "loss": 2.5, "bits_per_byte": None, "perplexity": 12.25}
    assert tuple(evaluation) == files.EVAL_KEYS and not (tmp_path / "tb").exists()
    assert own == evaluation | {"loss": 2.0, "cross_entropy": 2.5}


def test_nonfinite_values_are_valid_json_and_read_back(tmp_path):
    with files.Writers(tmp_path) as writers:
        writers.train(**train_line(1, loss=np.float32("nan"), grad_norm=float("-inf")))
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"} and line["loss"] is line["grad_norm"] is None
    (back,) = files.read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back["loss"]) and back["grad_norm"] == -math.inf and "nonfinite" not in back


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Limit the size of files, as if the disk was full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """No line is lost or written twice: a line that a full disk cut is removed before the next one."""
    path = tmp_path / "metrics.jsonl"
    with files.Writers(tmp_path) as writers:
        writers.train(**train_line(1))
        with files_up_to(path.stat().st_size + 10), pytest.raises(files.NotWritten) as cut:
            writers.train(**train_line(2))
        assert cut.value.filename == str(path) and str(path) in str(cut.value)
        with files_up_to(10), pytest.raises(files.NotWritten) as text:
            writers.samples([TextSample(1, 0, "a text of more than ten bytes")])
        assert text.value.filename == str(tmp_path / "samples.txt")
    with files.Writers(tmp_path) as writers:
        writers.train(**train_line(2))
    assert [line["step"] for line in files.read_metrics(path)] == [1, 2]
    (tmp_path / "file").write_text("old")
    for place in ("file", "file/below"):
        with files_up_to(2), pytest.raises(files.NotWritten) as found:
            files.write_atomic(tmp_path / place, "a long text")
        assert found.value.filename == str(tmp_path / place)
    assert (tmp_path / "file").read_text() == "old" and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(FileNotFoundError), files.replacing(tmp_path / "file"):
        (tmp_path / "another").read_text()  # the error of another file keeps its name


def test_a_tracker_that_cannot_write_is_left_out(tmp_path):
    """metrics.jsonl has all lines. The next attempt writes the tracker's files again from it."""

    class Broken(TensorBoard):
        def line(self, line, wall_time):
            raise OSError(28, "No space left on device")

    with files.Writers(tmp_path, [Broken(tmp_path), TensorBoard(tmp_path / "other")]) as writers:
        for step in (1, 2):
            writers.train(**train_line(step))
    assert [line["step"] for line in files.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [step for step, *_ in events(tmp_path / "other" / "tb")[0]] == [1, 2]


def test_a_full_disk_ends_tensorboard_and_holds_nothing_up(tmp_path):
    tracker = TensorBoard(tmp_path)
    with files_up_to(2000), pytest.raises(OSError):
        for step in range(20):
            tracker.line(line(step), 1.0)
        for _ in range(100):  # until the thread that writes has tried to
            tracker.line({"kind": "eval", "step": 20, "loss": 1.0}, 1.0)
            time.sleep(0.05)
    with pytest.raises(OSError):
        tracker.close(None)


def test_a_new_metric_is_one_entry_of_the_table(tmp_path, monkeypatch):
    """The step returns it; it is in metrics.jsonl, the log's line, TensorBoard, the page of the run and the docs."""
    chart = table.Chart("training", "Own, %")
    metric = table.Metric("nats", "a metric of the test", "own {:.2f}", chart, "own curve", factor=100, optional=True)
    monkeypatch.setitem(table.METRICS, "own/metric", metric)
    pending = PendingMetrics()
    returned = dict.fromkeys(("loss", "grad_norm", "lr", "own/metric", "not_a_metric"), jnp.float32(0.5))
    pending.put(1, returned | {"verdict": jnp.int32(0)}, {})
    found = pending.read()
    assert found and found.more == {"own/metric": 0.5}
    out = io.StringIO()
    with files.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers, progress.Console(tmp_path, 0, 9, stream=out) as console:
        line = train_line(1, **found.more)
        writers.train(**line)
        console.step(line)
    assert [x["own/metric"] for x in files.read_metrics(tmp_path / "metrics.jsonl")] == [0.5]
    assert "own 0.50" in out.getvalue() and "own 0.50" in (tmp_path / "log.txt").read_text()
    assert [values["train/own/metric"] for _, _, values in events(tmp_path / "tb")[0] if "train/own/metric" in values] == [0.5]
    assert curves_of(run_page.run_html([read_run(tmp_path)]))["own curve"] == {1: 50.0}
    assert "| `own/metric` | a metric of the test (nats) |" in table.markdown()[0]


def test_the_metrics_of_the_step_are_optional_entries_of_the_table():
    optional = {name for name, metric in table.METRICS.items() if metric.optional}
    assert {*shapes.EXPERT_METRICS, *shapes.MTP_METRICS, *shapes.REWARD_METRICS} == optional


def test_a_line_with_a_missing_or_an_unknown_number_is_refused(tmp_path):
    writers = files.Writers(tmp_path)
    for changed in (train_line(1, unknown=1.0), {k: v for k, v in train_line(1).items() if k != "hfu"}):
        with pytest.raises(TypeError):
            writers.train(**changed)
    with pytest.raises(TypeError):
        writers.gpu(**gpu_line(1), unknown=1.0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_log_that_cannot_be_written_moves_to_the_terminal(tmp_path, capsys):
    out = io.StringIO()
    with files_up_to(200), progress.Console(tmp_path, 0, 10, stream=out) as console:
        for i in range(9):
            console.say(f"message {i} " + "x" * 40)
    said = out.getvalue()
    assert said.count("xxx\n") == 9 and said.count(str(tmp_path / "log.txt")) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_rewind_forgets_later_steps_in_both_places(tmp_path):
    for attempt in range(2):
        with files.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
            if attempt:
                before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
                (tmp_path / "tb" / "events.out.tfevents.1.mine").write_bytes(b"")  # the file of another program stays
                assert writers.rewind(4) == files.Rewound(kept=5, dropped=3, cut=False)
                assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:5])
            for step in range(1 + 4 * attempt, 7):
                writers.train(**train_line(step, loss=step + 10.0 * attempt))
                if step in (2, 6):
                    writers.eval(step=step, loss=9.0, bits_per_byte=3.0, perplexity=7.0)
    lines = [(line["kind"], line["step"], line["loss"]) for line in files.read_metrics(tmp_path / "metrics.jsonl")]
    assert lines == [("train", 1, 1.0), ("train", 2, 2.0), ("eval", 2, 9.0), ("train", 3, 3.0), ("train", 4, 4.0),
                     ("train", 5, 15.0), ("train", 6, 16.0), ("eval", 6, 9.0)]  # fmt: skip
    found, restarts = events(tmp_path / "tb")
    assert [(step, v.get("train/loss", v.get("eval/loss"))) for step, _, v in found] == [line[1:] for line in lines]
    assert restarts == 1
    assert found[2][2] == {"eval/loss": 9.0, "eval/bits_per_byte": 3.0, "eval/perplexity": 7.0}
    times = [line.get("time_unix") for line in files.read_metrics(tmp_path / "metrics.jsonl")]
    assert found[0][1] == times[0] and found[2][1] == times[1] and found[3][1] == times[3]
    assert (tmp_path / "tb" / "events.out.tfevents.1.mine").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_cut_last_line(tmp_path):
    writers = files.Writers(tmp_path)
    for step in (1, 2, 3):
        writers.train(**train_line(step))
    writers.close()
    whole = writers.path.read_bytes()
    for cut in (1, 20, len(whole.splitlines()[-1]) - 1):  # even if only the newline is missing
        writers.path.write_bytes(whole[:-cut])
        assert [line["step"] for line in files.read_metrics(writers.path)] == [1, 2]
        assert writers.rewind(3) == files.Rewound(kept=2, dropped=0, cut=True)
        writers.path.write_bytes(whole[:-cut])
        writers.gpu(**gpu_line(3))  # without a rewind, a new line does not continue the old one
        writers.close()
        assert [line["step"] for line in files.read_metrics(writers.path)] == [1, 2, 3]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": ', 1))
    with pytest.raises(files.MetricsError, match="metrics.jsonl:2"):
        files.Writers(tmp_path).rewind(3)
    assert len(path.read_bytes().splitlines()) == 3 and not list(tmp_path.glob(".*"))


def test_gpu_lines_are_kept_and_shown(tmp_path):
    with files.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
        writers.train(**train_line(1))
        for gpu in (0, 1):
            writers.gpu(**gpu_line(1, gpu, power_w=600.0 + gpu, throttle_reasons="sw_thermal", ecc_uncorrected=None))
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {*table.GPU, "throttle_reasons"} < set(json.loads(text[1])) and json.loads(text[2])["power_w"] == 601.0
    shown: dict[str, Any] = {}
    for _, _, values in events(tmp_path / "tb")[0]:
        shown |= values
    assert shown["train/loss"] == 0.5 and shown["gpu/0/power_w"] == 600.0 and shown["gpu/1/power_w"] == 601.0
    assert not {"gpu/0/gpu", "gpu/0/process", "gpu/0/throttle_reasons", "gpu/0/ecc_uncorrected"} & set(shown)
    assert "gpu/3.1/power_w" in files.tracker_values({"kind": "gpu", **gpu_line(1, gpu=1, process=3)})


def test_other_processes_write_their_gpus_apart_and_nothing_else(tmp_path):
    for process in (0, 1):
        with files.Writers(tmp_path, [TensorBoard(tmp_path / f"tb{process}")], process_index=process) as writers:
            for step in (1, 2, 3):
                writers.train(**train_line(step))
                writers.gpu(**gpu_line(step, process=process))
            writers.samples([TextSample(2, process, "x")])
            writers.note("config", {})
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.1.jsonl", "samples.txt", "tb0"}
    other = list(files.read_metrics(tmp_path / "metrics.1.jsonl"))
    assert [(line["kind"], line["step"]) for line in other] == [("gpu", 1), ("gpu", 2), ("gpu", 3)]
    for process in (0, 1):  # each process rewinds its own file
        kept = files.Writers(tmp_path, process_index=process).rewind(2)
        assert kept == files.Rewound(4 - 2 * process, 2 - process, False)
    assert [line["step"] for line in files.read_metrics(tmp_path / "metrics.1.jsonl")] == [1, 2]
    (moved,) = files.Writers(tmp_path, process_index=1).set_aside()  # what was written without a checkpoint
    assert moved.name.startswith("metrics.1.set_aside-") and (tmp_path / "metrics.jsonl").exists()
    aside = files.Writers(tmp_path).set_aside()
    assert {p.name.partition(".set_aside-")[0] for p in aside} == {"metrics", "samples"}


def test_samples_file_can_be_read_back_whatever_a_model_writes() -> None:
    nasty = [
        TextSample(3, 0, "--- step 9\n--- step 9, prompt 2\n\n"),
        TextSample(4, 2, ""),
        TextSample(12, 1, "a\r\n--- step 1"),
    ]
    text = samples.format_samples(nasty)
    back = list(samples.parse_samples(text))
    assert [s[:2] for s in back] == [s[:2] for s in nasty]
    assert [s.text.replace(" ---", "---") for s in back] == [s.text for s in nasty]
    assert samples.format_samples(back) == text
    assert list(samples.parse_samples("no heading\n")) == []


# ---- Rates and memory


def run_loop(*, steps, data_s=0.0, warm_up_s=0.0, halt_after=(), save_after=()):
    """Run the trainer's loop against a simulated device of 0.5 s a step: step i is dispatched, then the result of step i - 1
    awaited. Returns (the rates, the clock).
    """
    now = [0.0]
    known: dict[str, Any] = {"tokens_per_step": 8000, "num_devices": 4, "flops_causal": 5e9, "flops_full": 6e9}
    throughput = Throughput(**known, flops_hardware=7e9, peak_flops=1e14, clock=lambda: now[0])
    if warm_up_s:
        throughput.start_step()
        now[0] += warm_up_s
    done = [now[0]]  # time at which the device finishes each step; index 0 is before the first
    for i in range(steps):
        throughput.start_step()
        with throughput.waiting_for_data():
            now[0] += data_s
        done.append(max(done[-1], now[0]) + 0.5)
        now[0] = max(now[0], done[-2])
        if i in halt_after:
            now[0] = max(now[0], done[-1]) + 30.0  # an evaluation waits for all dispatched steps
            throughput.exclude()
        if i in save_after:  # the newest metrics are read, then the device copies the state while the loop continues
            now[0] = max(now[0], done[-1])
            done[-1] += 3.0
            throughput.exclude(more=1)
    throughput.start_step()
    return throughput, now


def test_throughput_is_that_of_the_device():
    throughput, now = run_loop(steps=10, data_s=0.125)
    line = throughput.line()
    assert line == {
        "step_time_s": 0.5, "data_wait_s": 0.125, "tokens_per_s": 16000.0, "tokens_per_s_per_device": 4000.0,
        "tflops_per_device": 20.0, "mfu_causal": 0.2, "mfu_full": 0.24, "hfu": 0.28,
    }  # fmt: skip
    assert set(line) < set(table.required_names())
    assert set(throughput.line().values()) == {None}  # no step since the last line
    now[0] += 2.0
    throughput.start_step()
    assert throughput.line()["step_time_s"] == 2.0  # each line has its own mean


def test_a_step_of_another_size_has_its_own_tokens():
    throughput, now = run_loop(steps=10)
    assert throughput.line()["tokens_per_s"] == 16000.0
    throughput.resize(2000)
    for seconds in (7.0, 5.0, 0.25, 0.25):  # the steps beside the change are not counted
        now[0] += seconds
        throughput.start_step()
    line = throughput.line()
    assert (line["step_time_s"], line["tokens_per_s"], line["mfu_causal"]) == (0.25, 8000.0, 0.1)


@pytest.mark.parametrize(
    "loop",
    [
        {"steps": 12, "warm_up_s": 60.0, "halt_after": (4, 8)},
        {"steps": 12, "warm_up_s": 60.0, "halt_after": (4, 8), "data_s": 2.0},  # the data limits the speed
        {"steps": 16, "save_after": (4, 9)},
    ],
)
def test_halts_and_warm_up_and_copies_for_a_save_do_not_count(loop):
    line = run_loop(**loop)[0].line()
    data_s = loop.get("data_s", 0.0)
    assert line["step_time_s"] == pytest.approx(max(0.5, data_s)) and line["data_wait_s"] == pytest.approx(data_s)


def test_memory_is_that_of_the_fullest_device():
    used = [{"bytes_in_use": n * 2**30, "peak_bytes_in_use": (9 - n) * 2**30} for n in (2, 3)]
    assert memory_gib([SimpleNamespace(memory_stats=lambda told=told: told) for told in used]) == (3.0, 7.0)
    assert memory_gib(jax.local_devices()) == (None, None)  # CPUs report no memory


# ---- Messages


def test_lines_and_log(tmp_path):
    out = io.StringIO()
    line = train_line(10, loss=2.34567, tokens_per_s=12345.6, mfu_causal=0.451, peak_memory_gib=70.26, step_time_s=2.0)
    for _ in range(2):  # the second run appends
        with progress.Console(tmp_path, 0, 100, stream=out) as console:
            console.say("[bold]not markup[/bold] 100%d")
            console.tick(9)
            console.step(line)
            console.warn("careful")
    said = out.getvalue().splitlines()
    assert said[:3] == said[3:] and said[0] == "[bold]not markup[/bold] 100%d" and "careful" in said[2]
    assert all(number in said[1] for number in ("10/100", "2.3457", "12,346", "45.1%", "70.3", "3 min")) and len(said[1]) < 100
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 6 and log[1].endswith(" " + said[1]) and log[2].endswith("WARNING careful")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ", text) for text in log)
    more = progress.numbers(train_line(1, mfu_causal=1.02, expert_load_max=1.5, dropped_tokens=0.025), None, fp8_factor=0.5)
    assert all(number in more for number in ("102.0%", "51.0%", "1.50x", "2.50%"))


def test_the_time_left_goes_by_recent_lines(tmp_path, monkeypatch):
    now, out = [1000.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Console(tmp_path, 0, 1000, stream=out) as console:
        for step in range(1, 401):
            now[0] += 1.0 if step <= 300 else 10.0
            console.step(train_line(step, step_time_s=1.0))
        console.step(train_line(301, step_time_s=1.0))  # after a rollback
    left = [re.findall(r"left (.+)", text)[0] for text in out.getvalue().splitlines()]
    assert (left[99], left[299]) == ("15 min", "12 min")
    assert (left[399], left[400]) == ("1.7 h", "2.8 h")  # 600 steps of 10 s; 699, as the 75 lines before with what was undone


def test_the_time_left_goes_by_the_work_of_the_steps(tmp_path, monkeypatch):
    now, out = [1000.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Console(tmp_path, 0, 40, work=Ramp(40, ((10, 20),)).before, stream=out) as console:
        for step in range(1, 31):
            now[0] += 1.0 if step <= 20 else 4.0
            console.step(train_line(step, step_time_s=1.0 if step <= 20 else 4.0))
    left = [re.findall(r"left (.+)", text)[0] for text in out.getvalue().splitlines()]
    assert (left[0], left[9], left[29]) == ("99 s", "90 s", "40 s")


def test_a_message_that_the_terminal_cannot_show_is_escaped_there_and_whole_in_the_log(tmp_path):
    """A program that trains has its own streams, of an encoding of its own."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with progress.Console(tmp_path, 0, 10, stream=out) as console:
        console.say("größe \udcf6")
    assert out.buffer.getvalue() == b"gr\\xf6\\xdfe \\udcf6\n"  # pyright: ignore[reportAttributeAccessIssue]
    assert "größe \\udcf6" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_errors_and_foreign_warnings_are_in_the_log(tmp_path):
    out = io.StringIO()
    with pytest.raises(RuntimeError), progress.Console(tmp_path, 0, 10, stream=out):
        logging.getLogger("some.library").warning("look")
        raise RuntimeError("wrong")
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING look" in log and "Traceback" in log and log.endswith("RuntimeError: wrong\n")
    assert out.getvalue() == ""  # Python and the library's own handlers print to the terminal


# ---- Which steps are traced

WINDOW = Profile(start=3, steps=2)


@pytest.mark.parametrize(
    ("profile", "steps", "asked", "options", "windows", "refused"),
    [
        (WINDOW, range(1, 8), {}, {}, [(3, 4)], False),
        (WINDOW, range(1, 4), {}, {}, [(3, 3)], False),  # the run ends within the trace
        (WINDOW, range(4, 8), {}, {}, [(4, 4)], False),  # or the run starts at the traced steps
        (WINDOW, range(10, 12), {}, {}, [], True),
        (Profile(), range(1, 4), {}, {}, [], False),
        # Two requests during a trace cause one more trace after it.
        (Profile(steps=2), range(12), {2: 1, 3: 3, 9: 4}, {}, [(3, 4), (5, 6), (10, 11)], False),
        (Profile(steps=0), range(3), {0: 1}, {}, [], True),
        (Profile(steps=2), range(3), {0: 1}, {"process_index": 1}, [], True),
    ],
)
def test_the_steps_asked_for_are_traced(profile, steps, asked, options, windows, refused, tmp_path, monkeypatch):
    """The profiler is a fake that notes its calls; tests/proofs/test_traces.py uses a real one."""
    step, said, found, count = 0, [], [], [0]

    def written(*args: Any) -> None:
        found[-1] += (step,)
        file = tmp_path / f"profile/plugins/profile/{len(found)}/host.xplane.pb"
        file.parent.mkdir(parents=True)
        file.touch()

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **kwargs: found.append((step,)))
    monkeypatch.setattr(jax.profiler, "stop_trace", written)
    program = SimpleNamespace(as_text=lambda: "ENTRY")
    tracer = profiling.Tracer(profile, tmp_path, said.append, requests=lambda: count[0], program=program, **options)
    for step in steps:
        tracer.before_step(step)
        count[0] = asked.get(step, count[0])
        tracer.after_step(step, None)
    tracer.close()
    assert found == windows and not tracer.tracing
    assert [path.read_text() for path in tmp_path.rglob(profiling.HLO_TEXT)] == ["ENTRY"] * len(windows)
    assert len([text for text in said if text.startswith("No trace")]) == refused


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    """The part of the trace that was written is removed, so that the other files of the run have room."""
    said: list[str] = []

    def cut() -> None:
        (tmp_path / "profile" / "plugins" / "profile" / options[0].session_id).mkdir(parents=True)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: No space left on device")

    options: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: options.append(profiler_options))
    monkeypatch.setattr(jax.profiler, "stop_trace", cut)
    tracer = profiling.Tracer(Profile(start=1, steps=2), tmp_path, said.append, requests=lambda: 1)
    for step in range(6):  # a trace is asked for at step 0, and profile.start is reached in it
        tracer.before_step(step)
        tracer.after_step(step, None)
    assert len(options) == 1 and not tracer.tracing
    assert not list((tmp_path / "profile" / "plugins" / "profile").iterdir())
    assert len([text for text in said if text.startswith("No trace")]) == 2
