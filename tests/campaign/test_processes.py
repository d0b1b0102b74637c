"""Signals, kills, terminals and full disks, with real processes: the files that they leave, and how they end."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO, events

from jaxtrain import goodput, metrics
from jaxtrain.trackers.tensorboard import TensorBoard


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run code in a child process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, timeout=300, check=False, **pipes)


def test_importing_these_is_light():
    names = ("metrics", "progress", "receipt", "signals", "monitor")
    code = f"import sys, jaxtrain.{', jaxtrain.'.join(names)}\n"
    code += "print([name for name in ('jax', 'numpy', 'rich', 'tensorboardX') if name in sys.modules])"
    assert python(code).stdout == "[]\n"


def test_events_lost_in_a_kill_come_back(tmp_path):
    script = f"""
import os
from jaxtrain import metrics
from jaxtrain.trackers import tensorboard
tensorboard.FLUSH_S = 1e9
line = dict.fromkeys(metrics.TRAIN_KEYS[1:-1], 0.5)
writers = metrics.Writers({str(tmp_path)!r}, [tensorboard.TensorBoard({str(tmp_path)!r})])
for step in range(1, 6):
    writers.train(**line | dict(step=step))
os.kill(os.getpid(), 9)
"""
    assert python(script).returncode == -9
    assert len(list(metrics.read(tmp_path / "metrics.jsonl"))) == 5
    assert events(tmp_path / "tb")[0] == []  # the kill lost all events
    with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
        writers.rewind(3)
    assert [step for step, _, _ in events(tmp_path / "tb")[0]] == [1, 2, 3]


def test_a_disk_that_is_full_spoils_no_line(tmp_path: Path):
    """A full disk (a limit on file sizes) leaves no partial line in the goodput ledger. Later the ledger has all times."""
    path = tmp_path / goodput.FILE
    code = f"""
import resource, signal, time
from pathlib import Path
from jaxtrain import goodput
from jaxtrain.ledger import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({str(path)!r})
with Ledger(path, time.time()) as ledger:
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, -1))
    with ledger.during("compile"):
        time.sleep(0.1)
    assert path.read_bytes().endswith(b"}}\\n"), path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    with ledger.during("save"):
        time.sleep(0.1)
    found = ledger.close(0, "done")
assert found.parts["compile"] >= 0.1 and found.parts["save"] >= 0.1, found
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_run_outlives_its_terminal(tmp_path):
    script = f"""
from jaxtrain import progress
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
    assert log.count(" one\n") == 1 and log.count(" two\n") == 1 and log.count("cannot be written to") == 1


@pytest.mark.parametrize("columns", [120, 80])
def test_live_line_on_a_terminal(tmp_path, columns):
    """On a real pseudo-terminal one line is redrawn, messages are above it, and a kill leaves the cursor visible."""
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
        except OSError:  # Linux ends a pseudo-terminal like this
            break
        if not chunk:
            break
        seen += chunk
    os.close(main)
    assert child.wait(300) == 9
    text = seen.decode()
    assert "compiling" in text and "20/40" in text and "loss 6.6667" in text and "message [10] above" in text
    assert ("━" in text) == (columns == 120) and "GiB" in text[text.rindex("20/40") :]
    assert text.rindex("message [10] above") < text.rindex("20/40")  # the live line is drawn again below
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert "loss 3.3333" in (tmp_path / "log.txt").read_text()


# ---- Signals


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


STUCK = "import ctypes; lib = ctypes.CDLL(None); lock = bytes(64); lib.pthread_mutex_lock(lock); lib.pthread_mutex_lock(lock)"


def start_loop(body: str) -> subprocess.Popen:
    code = LOOP.replace("BODY", body)
    child = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("body", [POLL, STUCK], ids=["between steps", "stuck in C"])
@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 75, "SIGTERM"), (signal.SIGUSR1, 75, "SIGUSR1")],
)
def test_signals_are_heard_wherever_the_main_thread_is(body, number, code, name):
    """SIGUSR2 only requests a trace. A first stop signal ends a loop that polls for it; later ones also end a hang in C."""
    child = start_loop(body)
    assert child.stderr is not None
    for _ in range(3):
        child.send_signal(signal.SIGUSR2)
        assert [child.stderr.readline() for _ in range(2)] == ["\n", "SIGUSR2: a trace was asked for.\n"]
    assert child.poll() is None
    child.send_signal(number)
    said = [child.stderr.readline() for _ in range(2)][1]
    assert said == f"{name}: finishing this step, then saving. Again to leave at once.\n"
    for _ in range(600 if body == STUCK else 0):
        child.send_signal(number)  # the same request, unless enough time has passed
        try:
            child.wait(0.5)
            break
        except subprocess.TimeoutExpired:
            continue
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (code, "" if body == STUCK else f"{number.name} {code}\n")
    assert (f"{number.name} again: stopping at once" in err) == (body == STUCK)
