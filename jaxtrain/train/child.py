"""Run a measurement (a case) in a separate process, so that peak memory, XLA options and crashes affect only that case.

The parent never starts JAX, because JAX preallocates the GPU's memory. Request and answer are JSON files. The child's output
goes to a log. A long case saves partial answers (`save_partial`), so that they are not lost if the case runs out of time.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.config import own_parts
from jaxtrain.config.durations import duration
from jaxtrain.config.launch import REPO
from jaxtrain.config.schema import ConfigError
from jaxtrain.metrics.files import write_atomic
from jaxtrain.runtime.startup import cuda_hint

OK, REFUSED, NO_MEMORY, FAILED, LATE = "ok", "refused", "out of memory", "failed", "out of time"
KILLED_S = 10.0  # wait for a killed process to end
LAST_CHARACTERS = 600  # of a failed child's output in its answer; the log has the whole output

# On Linux, a child starts as this program. It sets that the kernel kills it when its parent ends, and then becomes the command.
# A `preexec_fn` could not do this: it runs between fork and exec, where a process with threads may hang.
PR_SET_PDEATHSIG = 1
END_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):  # the parent ended before the call
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_case(
    function: str,
    request: Mapping[str, Any],
    *,
    log: Path | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    killed_s: float = KILLED_S,
    python: str = sys.executable,
    script: Path | None = None,
) -> dict[str, Any]:
    """Return the answer of a case that runs in a new process.

    Args:
      function: "package.module:function" of the case, which takes a dict and returns a dict, both plain JSON.
      request: the argument of the function.
      log: the file for the child's output.
      environ: the child's environment; None: this process's environment.
      limit_s: seconds after which the child is killed; None: no limit.
      killed_s: seconds to wait for a killed child to end. A child inside a hanging driver may never end.
      python, script: with a script, run `PYTHON SCRIPT REQUEST ANSWER` in place of `function`, which is then ignored.

    Returns:
      The answer of the case. `verdict` is OK, REFUSED, NO_MEMORY, FAILED or LATE. `why` is the reason for a verdict other than
      OK. If the case raised ConfigError, the verdict is REFUSED, and `problems` has the fields of its problems. `seconds` is
      the time of the process. After an error, a crash or a timeout, the answer has what `save_partial` saved last.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        request_file, answer_file = Path(folder, "request.json"), Path(folder, "answer.json")
        request_file.write_text(json.dumps({**request, "answer_file": str(answer_file)}), encoding="utf-8")
        command = [python, str(script)] if script else [sys.executable, "-m", __spec__.name, function]
        command += [str(request_file), str(answer_file)]
        log = log or Path(folder, "log.txt")
        code, output = run_program(command, log, environ=environ, limit_s=limit_s, killed_s=killed_s)
        answer = json.loads(answer_file.read_text(encoding="utf-8")) if answer_file.exists() else {}
    if answer.get("verdict", LATE) == LATE:  # the case ended before its final answer
        late = {"verdict": LATE, "why": f"not done after {duration(limit_s)}"} if code is None and limit_s else None
        answer |= late or {"verdict": FAILED, "why": f"exit code {code}: {last_lines(output)}"}
    return answer | {"seconds": time.perf_counter() - began}


def save_partial(request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Save the results of a case so far. They become the answer of the case if it crashes or is killed.

    Args:
      answer: the results, with a verdict. `run_case` replaces LATE by the verdict on the crash or the timeout. It keeps any
        other verdict, although later results may then be missing.
    """
    if "answer_file" in request:  # the case runs in a child
        write_atomic(Path(request["answer_file"]), json.dumps(answer))


def run_program(
    command: list[str],
    log: Path,
    *,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    killed_s: float = KILLED_S,
) -> tuple[int | None, str]:
    """Run a program with this package on its PYTHONPATH. Return (exit code, or None after a timeout; output).

    When this function returns or raises, also after Ctrl-C, the child's process group has been killed. If the child calls this
    function too, its own children are in other process groups. On Linux, they are killed when the child ends. In a hanging
    driver, a killed process may exist for longer than `killed_s`.
    """
    with open_program(command, log, environ, killed_s) as process:
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
    return code, log.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def open_program(
    command: list[str], log: Path, environ: Mapping[str, str] | None = None, killed_s: float = KILLED_S
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running program as `run_program` starts it. After the block, its process group has been killed (SIGKILL)."""
    environ = dict(os.environ if environ is None else environ)
    environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(REPO), environ.get("PYTHONPATH", "")) if p)
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = [sys.executable, "-I", "-c", END_WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*begin, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # all its processes have ended
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver can keep a killed process
                process.wait(killed_s)


def jaxtrain_command(name: str, *args: str) -> list[str]:
    """Return the command line that runs a command of jaxtrain in this interpreter."""
    return [sys.executable, "-m", "jaxtrain", name, *args]


def last_lines(output: str) -> str:
    """Return the last three lines of a program's output, joined. A Python error ends with its source line and message."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-LAST_CHARACTERS:] or "no output"


def error_line(error: BaseException) -> str:
    """Return an exception as one line."""
    line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return f"{line} {cuda_hint(str(error))}".rstrip()


def main(argv: list[str]) -> int:
    """Run a case. argv: FUNCTION REQUEST ANSWER, with the JSON files of request and answer."""
    function, request_file, answer_file = argv
    module, _, name = function.partition(":")
    case = getattr(importlib.import_module(module), name)
    try:
        answer = case(json.loads(Path(request_file).read_text(encoding="utf-8")))
    except Exception as error:
        answer = json.loads(Path(answer_file).read_text(encoding="utf-8")) if Path(answer_file).exists() else {}
        own_problem = own_parts.problem_of(error)
        if problems := error.problems if isinstance(error, ConfigError) else [own_problem] if own_problem else []:
            why = "; ".join(dict.fromkeys(map(str, problems)))
            answer |= {"verdict": REFUSED, "why": why, "problems": [dataclasses.asdict(problem) for problem in problems]}
        elif "RESOURCE_EXHAUSTED" in str(error):  # JAX's JaxRuntimeError
            traceback.print_exc()
            answer |= {"verdict": NO_MEMORY, "why": str(error).splitlines()[0][:200]}
        else:
            raise
    write_atomic(Path(answer_file), json.dumps(answer))
    return 0


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run a case, and end this process at once: threads and exit handlers of a user's module must not delay the answer."""
    code = 1
    try:
        code = main(argv)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):  # the module closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(sys.argv[1:])
