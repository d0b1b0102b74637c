"""Commands as real processes: Ctrl-C at any moment, wrong command lines, and arguments that no command accepts."""

import os
import signal
import subprocess
import sys

import pytest
import runs

# ---- Ctrl-C

RUN = """
import hashlib, os, signal, sys, threading, time
{before}
from jaxtrain.command_line import Command, run_command
def act(parsed):
    threading.Timer(1.0, os.write, (1, b"began\\n")).start()  # while the work is being done
    {work}
    return 0
sys.exit(run_command(Command("report", "Write a page."), [], act))
"""
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # minutes in C without the GIL, like a compile in XLA


def _start(work: str, before: str = "") -> subprocess.Popen[str]:
    code = RUN.format(work=work, before=before)
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
    process = _start(BUSY)
    assert process.stdout and process.stderr and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("Ctrl-C: waiting for the computation that is running; press again")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n" and process.returncode == 130


# ---- Wrong command lines


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("main --workdir=", "--workdir = '': has no value."),
        ("plan --jobs=0", "--jobs = '0': must be a whole number, 1 or more."),
        ("bench --devices=0", "--devices = '0': must be a whole number, 1 or more."),
        ("receipt show ''", "show|list|diff RUN = '': is empty."),
        ("report ''", "is empty."),
        ("checkpoint list ''", "argument has no value."),
        ("sample --workdir=", "--workdir = '': has no value."),
        ("data prepare --input=a.txt --output=", "--output has no value."),
        ("data verify ''", "argument has no value."),
        ("data", "the following arguments are required: COMMAND"),
        ("hf import tiny --out ''", "--out has no value."),
        ("lm_eval --workdir= --tasks=a", "--workdir has no value."),
    ],
)
def test_a_wrong_command_line_is_an_error_in_one_style(line: str, error: str):
    name, *argv = line.replace("''", "EMPTY").split()
    argv = ["" if word == "EMPTY" else word for word in argv]
    done = subprocess.run([sys.executable, "-m", f"jaxtrain.{name}", *argv], capture_output=True, text=True, cwd=runs.REPO)
    *errors, last = done.stderr.splitlines()
    assert (
        done.returncode == 2
        and last == f"{len(errors)} problem{'s' * (len(errors) > 1)}; nothing was started and nothing written"
    )
    assert all(said.startswith("error: ") for said in errors) and error in done.stderr


def test_the_command_for_checkpoints_prints_nothing_of_xla(tmp_path):
    """jaxtrain.checkpoint reads files without jax: jax's CUDA plugin would print lines on a machine without a GPU."""
    code = "import sys, jaxtrain.checkpoint.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    line = [sys.executable, "-m", "jaxtrain.checkpoint", "list", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(line, capture_output=True, text=True, env=environ)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
