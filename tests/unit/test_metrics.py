"""The output of a run: metrics, TensorBoard events, samples, rates, messages; also signals, and which steps are traced."""

import io
import json
import logging
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_runs import gpu_line, train_line
from runs import events

from jaxtrain import metrics, profiling, progress, samples, signals
from jaxtrain.config import Profile
from jaxtrain.samples import Sample
from jaxtrain.throughput import Throughput, memory
from jaxtrain.trackers.tensorboard import SUFFIX, TensorBoard
from jaxtrain.train import evaluate

# ---- metrics.jsonl, metrics.N.jsonl, samples.txt and tb/


def test_lines_have_the_documented_keys_and_every_digit(tmp_path):
    loss = np.float32(0.1)
    with metrics.Writers(tmp_path) as writers:
        writers.train(**train_line(1, loss=jnp.float32(0.1), grad_norm=loss, lr=1 / 3, mfu_full=None, tokens=np.int64(7)))
        writers.eval(step=1, loss=2.5, bits_per_byte=None, perplexity=12.25)
        # before the file is closed: each line is flushed
        train, evaluation = (tmp_path / "metrics.jsonl").read_text().splitlines()
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
                (tmp_path / "tb" / "events.out.tfevents.1.mine").write_bytes(b"")  # the file of another program stays
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
    # Any number of resumes leaves two files: the file in use and an emptied one, which an open TensorBoard may still read.
    for _ in range(3):
        with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
            writers.rewind(6)
        sizes = [path.stat().st_size for path in sorted((tmp_path / "tb").glob(f"*{SUFFIX}*"))]
        assert len(sizes) == 2 and sizes[0] == 0 < sizes[1]
    assert [step for step, _, _ in events(tmp_path / "tb")[0]] == [line[1] for line in lines]


def test_a_cut_last_line(tmp_path):
    for process in (0, 2):
        writers = metrics.Writers(tmp_path, process_index=process)
        for step in (1, 2, 3):
            writers.train(**train_line(step)) if process == 0 else writers.gpu(**gpu_line(step, process=process))
        writers.close()
        whole = writers.path.read_bytes()
        for cut in (1, 20, len(whole.splitlines()[-1]) - 1):  # even if only the newline is missing
            writers.path.write_bytes(whole[:-cut])
            assert [line["step"] for line in metrics.read(writers.path)] == [1, 2]
            assert writers.rewind(3) == metrics.Rewound(kept=2, dropped=0, cut=True)
            writers.path.write_bytes(whole[:-cut])
            writers.gpu(**gpu_line(3, process=process))  # without a rewind, a new line does not continue the old one
            writers.close()
            assert [line["step"] for line in metrics.read(writers.path)] == [1, 2, 3]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": ', 1))
    with pytest.raises(metrics.MetricsError, match=r"metrics.jsonl:2: .*Repair or delete"):
        metrics.Writers(tmp_path).rewind(3)
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


def test_gpu_lines_are_kept_and_shown(tmp_path):
    with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
        writers.train(**train_line(1))
        for gpu in (0, 1):
            writers.gpu(**gpu_line(1, gpu, power_w=600.0 + gpu, throttle_reasons="sw_thermal", ecc_uncorrected=None))
        with pytest.raises(TypeError, match=r"a gpu line lacks \['power_w'\]"):
            writers.gpu(**{k: v for k, v in gpu_line(1).items() if k != "power_w"})
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert tuple(json.loads(text[1])) == metrics.GPU_KEYS and json.loads(text[2])["power_w"] == 601.0
    shown: dict[str, Any] = {}
    for step, _, values in events(tmp_path / "tb")[0]:
        assert step == 1
        shown |= values
    assert shown["train/loss"] == 0.5 and shown["gpu/0/power_w"] == 600.0 and shown["gpu/1/power_w"] == 601.0
    assert not {"gpu/0/gpu", "gpu/0/process", "gpu/0/throttle_reasons", "gpu/0/ecc_uncorrected"} & set(shown)
    assert "gpu/3.1/power_w" in metrics.tagged({"kind": "gpu", **gpu_line(1, gpu=1, process=3)})


def test_other_processes_write_their_gpus_apart(tmp_path):
    for process in (0, 1):
        with metrics.Writers(tmp_path, process_index=process) as writers:
            for step in (1, 2, 3):
                writers.train(**train_line(step))
                writers.gpu(**gpu_line(step, process=process))
    files = {name: list(metrics.read(tmp_path / name)) for name in ("metrics.jsonl", "metrics.1.jsonl")}
    assert [(line["kind"], line["step"]) for line in files["metrics.1.jsonl"]] == [("gpu", 1), ("gpu", 2), ("gpu", 3)]
    assert len(files["metrics.jsonl"]) == 6
    for process in (0, 1):  # each process rewinds its own file
        kept = metrics.Writers(tmp_path, process_index=process).rewind(2)
        assert kept == metrics.Rewound(4 - 2 * process, 2 - process, False)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.1.jsonl")] == [1, 2]
    (moved,) = metrics.Writers(tmp_path, process_index=1).set_aside()
    assert moved.name.startswith("metrics.1.set_aside-") and (tmp_path / "metrics.jsonl").exists()


def test_what_was_written_without_a_checkpoint_is_set_aside(tmp_path: Path) -> None:
    with metrics.Writers(tmp_path) as writers:
        writers.samples([Sample(2, 0, "x")])
        writers.eval(step=2, loss=1.0, bits_per_byte=None, perplexity=2.7)
        writers.close()
        assert {p.name.partition(".set_aside-")[0] for p in writers.set_aside()} == {"metrics", "samples"}
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".jsonl", ".txt"]
    other = metrics.Writers(tmp_path / "other", [TensorBoard(tmp_path / "other")], process_index=1)
    other.samples([Sample(2, 0, "x")])
    other.note("config", {})
    other.close(0)
    assert not (tmp_path / "other").exists()


def test_samples_file_can_be_read_back_whatever_a_model_writes() -> None:
    nasty = [
        Sample(3, 0, "--- step 9\n--- step 9, prompt 2\n\n"),
        Sample(4, 2, ""),
        Sample(12, 1, "a\n--- step x\r\n--- step 1"),
    ]
    text = samples.write(nasty)
    back = list(samples.read(text))
    assert [s[:2] for s in back] == [s[:2] for s in nasty]
    assert [s.text.replace(" ---", "---") for s in back] == [s.text for s in nasty]
    assert samples.write(back) == text
    assert list(samples.read("no heading\n")) == []


def test_prompts_are_split_and_perplexity_has_no_bound() -> None:
    assert samples.prompts("") == [""] and samples.prompts("a||b|c||") == ["a", "b|c", ""]
    assert evaluate.perplexity(0.0) == 1 and evaluate.perplexity(1e4) == math.inf and math.isnan(evaluate.perplexity(math.nan))


# ---- Rates and memory


def run_loop(throughput, now, *, steps, device_s, data_s=0.0, halt_after=(), halt_s=0.0, save_after=(), copies_s=0.0):
    """Run the trainer's loop against a simulated device: step i is dispatched, then the loop waits for the result of step i -
    1.
    """
    done = [0.0]  # time at which the device finishes each step; index 0 is before the first
    for i in range(steps):
        throughput.start_step()
        with throughput.waiting_for_data():
            now[0] += data_s
        done.append(max(done[-1], now[0]) + device_s)
        now[0] = max(now[0], done[-2])
        if i in halt_after:
            now[0] = max(now[0], done[-1]) + halt_s  # an evaluation waits for all dispatched steps
            throughput.exclude()
        if i in save_after:  # the newest metrics are read, then the device copies the state while the loop continues
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
    assert set(throughput.line().values()) == {None}  # no step since the last line
    now[0] += 2.0
    throughput.start_step()
    assert throughput.line()["step_time_s"] == 2.0  # each line has its own mean


@pytest.mark.parametrize("data_s", [0.0, 2.0])  # either the device or the data limits the speed
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


def test_memory_is_that_of_the_fullest_device():
    used = [{"bytes_in_use": n * 2**30, "peak_bytes_in_use": (9 - n) * 2**30} for n in (2, 3)]
    assert memory([SimpleNamespace(memory_stats=lambda told=told: told) for told in used]) == (3.0, 7.0)
    assert memory(jax.local_devices()) == (None, None)  # CPUs report no memory


# ---- Messages


def test_plain_lines_and_log(tmp_path):
    out = io.StringIO()
    line = train_line(10, loss=2.34567, tokens_per_s=12345.6, mfu_causal=0.451, peak_memory_gib=70.26, step_time_s=2.0)
    for _ in range(2):  # the second run appends
        with progress.Console(tmp_path, 0, 100, stream=out) as console:
            console.say("[bold]not markup[/bold] 100%d")
            console.tick(9)
            console.step(line)
            console.warn("careful")
    shown = "step 10/100  loss 2.3457  grad 0.50  lr 5.0e-01  12,346 tok/s  MFU 45.1%  70.3 GiB  left 3m00s"
    assert out.getvalue().splitlines() == ["[bold]not markup[/bold] 100%d", shown, "warning: careful"] * 2
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 6 and log[1].endswith(" " + shown) and log[2].endswith("WARNING careful")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ", text) for text in log)
    unknown = progress.numbers(train_line(1, tokens_per_s=None, mfu_causal=None, peak_memory_gib=None), None)
    assert unknown == "loss 0.5000  grad 0.50  lr 5.0e-01"
    eight = progress.numbers(train_line(1, mfu_causal=1.02), None, of_fp8=0.5)
    assert "MFU 102.0% (51.0% of the FP8 peak)" in eight
    assert [progress.duration(s) for s in (0.4, 59.6, 3600, 200000)] == ["0s", "1m00s", "1h00m", "2d07h"]


def test_a_progress_line_fits_100_columns(tmp_path):
    """The line is of a dense model on GPUs, late in a long run."""
    numbers = {"loss": 2.3456, "grad_norm": 0.523, "lr": 3e-4, "tokens_per_s": 96512.0, "mfu_causal": 0.451}
    line = progress.numbers(train_line(1, **numbers, peak_memory_gib=131.2), 18420.0)
    assert len("step 12000/50000  " + line) <= 100


def test_a_new_metric_is_one_column(monkeypatch):
    monkeypatch.setitem(progress.COLUMNS, "aux_loss", "aux {:.2f}")
    assert "  aux 0.25" in progress.numbers(train_line(1) | {"aux_loss": 0.25}, None)
    assert "load 1.50x  dropped 2.50%" in progress.numbers(
        train_line(1) | {"expert_load_max": 1.5, "dropped_tokens": 0.025}, 1.0
    )
    assert "dropped" not in progress.numbers(train_line(1) | {"dropped_tokens": 0.0}, 1.0)


def test_the_time_left_goes_by_recent_lines(tmp_path, monkeypatch):
    """The time left follows the wall time of recent lines, in which evaluations and saves are included."""
    now, out = [1000.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Console(tmp_path, 0, 1000, stream=out) as console:
        for step in range(1, 401):
            now[0] += 1.0 if step <= 300 else 10.0
            console.step(train_line(step, step_time_s=1.0))
        console.step(train_line(301, step_time_s=1.0))  # after a rollback
    left = [re.findall(r"left (\S+)", text)[0] for text in out.getvalue().splitlines()]
    assert left[99] == "15m00s" and left[299] == "11m40s"
    assert left[399] == "1h40m", "600 steps of 10 s"
    assert left[400] == "2h46m", "699 steps, as the 75 lines before took with what was undone"


def test_the_time_left_of_the_first_lines(tmp_path, monkeypatch):
    now, out = [1000.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Console(tmp_path, 0, 100, stream=out) as console:
        for step, at in ((20, 1000.0), (30, 1050.0), (60, 1120.0)):
            now[0] = at
            console.step(train_line(step, step_time_s=2.0))
    left = [re.findall(r"left (\S+)", text)[0] for text in out.getvalue().splitlines()]
    assert left == ["2m40s", "5m50s", "2m00s"]  # 80 steps of 2 s, then 70 steps of 50 s / 10, then 40 steps of 120 s / 40


def test_other_processes_log_apart_and_warn_aloud(tmp_path):
    out = io.StringIO()
    with progress.Console(tmp_path, 3, 100, stream=out) as console:
        console.say("quiet")
        console.warn("loud")
    assert out.getvalue() == "warning: [process 3] loud\n"
    assert len((tmp_path / "log.3.txt").read_text().splitlines()) == 2 and not (tmp_path / "log.txt").exists()


def test_errors_and_foreign_warnings_are_in_the_log(tmp_path):
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="went wrong"), progress.Console(tmp_path, 0, 10, stream=out):
        logging.getLogger("some.library").warning("look at this")
        raise RuntimeError("it went wrong")
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING look at this" in log and "Traceback" in log and log.endswith("RuntimeError: it went wrong\n")
    assert out.getvalue() == ""  # Python and the library's own handlers print to the terminal


# ---- Signals


def test_handlers_come_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with signals.Stop(signals=(signal.SIGINT, signal.SIGUSR1)) as stop:
        assert signal.getsignal(signal.SIGTERM) == before[1] and signal.getsignal(signal.SIGINT) != before[0]
        assert not stop and stop.exit_code is None
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


# ---- Which steps are traced


WINDOW = Profile(start=3, steps=2)


@pytest.mark.parametrize(
    ("profile", "steps", "asked", "options", "windows", "words"),
    [
        (WINDOW, range(1, 8), {}, {}, [(3, 4)], ""),
        (WINDOW, range(1, 4), {}, {}, [(3, 3)], ""),  # the run ends within the trace
        (WINDOW, range(4, 8), {}, {}, [(4, 4)], ""),  # or the run starts at the traced steps
        (WINDOW, range(10, 12), {}, {}, [], "No trace: this run starts at step 10, behind profile.start=3."),
        (Profile(), range(1, 4), {}, {}, [], ""),
        # Two requests during a trace cause one more trace after it.
        (Profile(steps=2), range(12), {2: 1, 3: 3, 9: 4}, {}, [(3, 4), (5, 6), (10, 11)], ""),
        (Profile(steps=0), range(3), {0: 1}, {}, [], "No trace: profile.steps = 0."),
        (Profile(steps=2), range(3), {0: 1}, {"process_index": 1}, [], "No trace by this process: process 0 takes it"),
        (Profile(steps=1), range(3), {0: 1}, {"graphs": True}, [(1, 1)], "profile.start above 0 is compiled without graphs"),
    ],
)
def test_the_steps_asked_for_are_traced(profile, steps, asked, options, windows, words, tmp_path, monkeypatch):
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
    tracer = profiling.Tracer(profile, tmp_path, said.append, asked=lambda: count[0], program=program, **options)
    for step in steps:
        tracer.before_step(step)
        count[0] = asked.get(step, count[0])
        tracer.after_step(step, None)
    tracer.close()
    assert found == windows and not tracer.tracing
    assert len([text for text in said if text.startswith("Tracing steps")]) == len(windows)
    assert [path.read_text() for path in tmp_path.rglob(profiling.HLO_TEXT)] == ["ENTRY"] * len(windows)
    assert words in "".join(said) and len([text for text in said if text.startswith("No trace")]) == words.startswith(
        "No trace"
    )
