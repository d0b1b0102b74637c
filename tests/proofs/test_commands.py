"""Commands as real processes: Ctrl-C at any moment, and wrong command lines."""

import os
import signal
import subprocess
import sys

import pytest
import runs

RUN = """
import hashlib, os, signal, sys, threading, time
{before}
from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Parser
def watch(clock, until):
    while time.clock_gettime(clock) < until:
        time.sleep(0.01)
    os.write(1, b"began\\n")  # while the work is being done
def act(parsed):
    clock = time.pthread_getcpuclockid(threading.get_ident())
    threading.Thread(target=watch, args=[clock, time.clock_gettime(clock) + {after}], daemon=True).start()
    {work}
    return 0
sys.exit(run_command(Parser("report", "Write a page."), [], act))
"""
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # minutes in C without the GIL, like a compile in XLA


def _start(work: str, before: str = "", after: float = 0.0) -> subprocess.Popen[str]:
    """Start a command that writes `began` when its main thread has computed for `after` seconds."""
    code = RUN.format(work=work, before=before, after=after)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_a_command_with_one_line():
    process = _start("time.sleep(600)")
    assert process.stdout and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n" and process.returncode == 130


def test_ctrl_c_during_imports_ends_a_command_with_one_line():
    """While `python -m` imports the package (sys.argv[0] is still `-m`), the signal's handler ends the process.

    A KeyboardInterrupt could be caught by an `except BaseException` around an import.
    """
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    process = _start("pass", f"sys.argv = ['-m']; import jaxtrain\ntry:\n    {interrupt}\nexcept BaseException:\n    pass")
    assert process.communicate() == ("", "interrupted\n") and process.returncode == 130


def test_ctrl_c_during_a_computation_is_answered_and_a_second_one_ends_it():
    process = _start(BUSY, after=0.5)
    assert process.stdout and process.stderr and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("Ctrl-C: ")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n" and process.returncode == 130


@pytest.mark.parametrize("line", ["main --workdir=", "plan --jobs=0", "checkpoint list nowhere", "data"])
def test_a_wrong_command_line_is_refused(line: str):
    name, *argv = line.split()
    done = subprocess.run([sys.executable, "-m", "jaxtrain", name, *argv], capture_output=True, text=True, cwd=runs.REPO)
    assert done.returncode == 2 and done.stdout == ""
    assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_the_command_for_checkpoints_prints_nothing_of_xla(tmp_path):
    """jaxtrain.checkpoint reads files without jax: jax's CUDA plugin would print lines on a machine without a GPU."""
    line = (
        "import sys; from jaxtrain.commands.checkpoint import main; main(['list', sys.argv[1]]); sys.exit('jax' in sys.modules)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", line, str(tmp_path)], capture_output=True, text=True, env=environ)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("line", ["main --workdir=", "main --coordinator= --process-id=", "preflight --num-processes= --json="])
def test_an_empty_value_is_refused_before_anything_uses_it(line: str):
    name, *argv = line.split()
    done = subprocess.run([sys.executable, "-m", "jaxtrain", name, *argv], capture_output=True, text=True, cwd=runs.REPO)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [text.partition(" = ")[0] for text in done.stderr.splitlines()[:-1]] == [
        f"error: {option.removesuffix('=')}" for option in argv
    ]


@pytest.mark.parametrize("module", ["jaxtrain.plan", "jaxtrain.commands.plan", "jaxtrain.commands.hf", "jaxtrain.data"])
def test_a_command_that_is_started_as_a_module_names_the_form_that_works(module: str):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=runs.REPO)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert f"python -m jaxtrain {module.rpartition('.')[2]}" in done.stderr
