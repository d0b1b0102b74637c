"""Commands as real processes: Ctrl-C at any moment, and wrong command lines."""

import os
import signal
import subprocess
import sys

import pytest
import runs

RUN = """
import os, signal, sys, time
{before}
from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Parser
def act(parsed):
    {work}
    return 0
sys.exit(run_command(Parser("report", "Write a page."), [], act))
"""
WAIT = "os.write(1, b'began\\n'); time.sleep(600)"


def _start(work: str, before: str = "") -> subprocess.Popen[str]:
    """Start a command that does this work, and run these lines before it is imported."""
    code = RUN.format(work=work, before=before)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_a_command_with_one_line():
    process = _start(WAIT)
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


def test_ctrl_c_is_a_keyboard_interrupt_for_the_work_of_a_command():
    """What a command must finish or clean up at its end is done before that line."""
    process = _start(f"try: {WAIT}\n    finally: os.write(1, b'cleaned\\n')", "sys.argv = ['-m']")
    assert process.stdout and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("cleaned\n", "interrupted\n") and process.returncode == 130


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
