"""Imports, terminals and signals, with real processes: the files that they leave, and how they end."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest
from runs import REPO


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run code in a child process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, timeout=300, check=False, **pipes)


VALIDATED = "from pathlib import Path; from jaxtrain.config import hardware; from jaxtrain.data import loading;"
VALIDATED += "from jaxtrain.step.validate import validate;"
VALIDATED += "assert not validate(loading.load_config([]).run, hardware.probe(), Path('runs/test'))"


@pytest.mark.parametrize(
    "code",
    [
        "import jaxtrain.metrics.files, jaxtrain.metrics.progress, jaxtrain.metrics.receipt, jaxtrain.metrics.gpu_monitor",
        "import jaxtrain.runtime.signals, jaxtrain.config.launch, jaxtrain.commands.api",
        "import jaxtrain.main, jaxtrain.models, jaxtrain.models.families.llama",
        VALIDATED,
    ],
)
def test_these_import_no_jax(code: str):
    """The memory budget is set after validation and before the import of JAX."""
    done = python(f"import sys; {code}; print([name for name in ('jax', 'tensorboardX') if name in sys.modules])")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_run_outlives_its_terminal(tmp_path):
    script = f"""
from jaxtrain.metrics import progress
with progress.Console({str(tmp_path)!r}, 0, 10) as console:
    console.say("one")
    console.say("two")
raise SystemExit(75)
"""
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough lines
    done = python(script, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (75, "")
    log = (tmp_path / "log.txt").read_text()
    assert log.count(" one\n") == log.count(" two\n") == 1


def test_live_line_on_a_terminal(tmp_path):
    """On a real pseudo-terminal one line is redrawn, messages are above it, and a kill leaves the cursor visible."""
    script = f"""
import os
from jaxtrain.metrics import progress, table
line = dict.fromkeys(("step", *table.required_names()), 0.5)
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
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stdout=side, stderr=side, stdin=side, env=environ)
    os.close(side)
    seen = b""
    with contextlib.suppress(OSError):  # Linux ends a pseudo-terminal like this
        while chunk := os.read(main, 65536):
            seen += chunk
    os.close(main)
    assert child.wait(300) == 9
    text = seen.decode()
    assert "compiling" in text and "loss 6.6667" in text
    assert text.rindex("message [10] above") < text.rindex("20/40")  # the live line is drawn again below
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert "loss 3.3333" in (tmp_path / "log.txt").read_text()


# ---- Signals


LOOP = """
import sys, time
from jaxtrain.runtime.signals import Stop
with Stop() as stop:
    print("ready", flush=True)
    BODY
print(stop.reason, flush=True)
sys.exit(stop.exit_code_of(stop.reason))
"""
POLL = "while stop.reason is None: time.sleep(0.01)"
STUCK = "import ctypes; lib = ctypes.CDLL(None); lock = bytes(64); lib.pthread_mutex_lock(lock); lib.pthread_mutex_lock(lock)"


@pytest.mark.parametrize(
    ("body", "number", "code"),
    [(POLL, signal.SIGINT, 130), (STUCK, signal.SIGTERM, 75)],
    ids=["between steps", "stuck in C"],
)
def test_signals_are_heard_wherever_the_main_thread_is(body: str, number: signal.Signals, code: int):
    """SIGUSR2 only requests a trace. A first stop signal ends a loop that polls for it; later ones also end a hang in C."""
    code_of_loop = LOOP.replace("BODY", body)
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code_of_loop], cwd=REPO, stdout=pipe, stderr=pipe, text=True)
    assert child.stdout and child.stderr and child.stdout.readline() == "ready\n"
    for _ in range(3):
        child.send_signal(signal.SIGUSR2)
        assert "SIGUSR2" in "".join(child.stderr.readline() for _ in range(2))
    assert child.poll() is None
    child.send_signal(number)
    assert "".join(child.stderr.readline() for _ in range(2)).strip()
    for _ in range(600 if body == STUCK else 0):
        child.send_signal(number)  # the same request, unless enough time has passed
        try:
            child.wait(0.5)
            break
        except subprocess.TimeoutExpired:
            continue
    out, _ = child.communicate(timeout=300)
    assert (child.returncode, out) == (code, "" if body == STUCK else f"{number.name}\n")
