"""One measurement in a process of its own, so that peak memory, XLA's options and a crash are those of the case alone.

The parent never starts JAX: a GPU's memory is preallocated by whoever does. It asks by a JSON file and is answered by another;
what the child prints goes to a log. A case that takes long answers more than once (`keep`), so that one which is ended keeps
what it had found.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.launch import REPO
from jaxtrain.metrics import write_atomic

OK, REFUSED, NO_MEMORY, FAILED, LATE = "ok", "refused", "out of memory", "failed", "out of time"
# How many characters of a failed child's last words are kept in a result; all of them are in the log.
LAST_WORDS = 600

# What a child begins as, on Linux: it is killed when its parent ends, however that happens, and becomes its program. (Not a
# `preexec_fn`: that runs between fork and exec, where a process with threads may hang.)
PR_SET_PDEATHSIG = 1
WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
os.execvp(sys.argv[1], sys.argv[1:])
"""

# Each takes one dict and returns another, both of them plain JSON.
CASES = {
    "steps": "jaxtrain.bench.measure:steps",
    "kernels": "jaxtrain.bench.kernels:measure",
    "attention": "jaxtrain.bench.check:attention_cases",
    "experts": "jaxtrain.bench.experts:cases",
    "save": "jaxtrain.bench.check:save_and_restore",
    "example": "jaxtrain.bench.peer:export_example",
}


def apart(
    kind: str,
    ask: Mapping[str, Any],
    *,
    log: Path | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """The answer of a case, made in a new process. What breaks the process, or outlasts `limit_s`, becomes an answer too.

    Every answer has `verdict` (ok, refused, out of memory, failed, out of time), `why` where it is not ok, and `seconds`; one
    of a case that was ended also what that had kept by then.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "ask.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps({**ask, "answer": str(answered)}))
        code, said = run(
            program("bench.case", kind, str(asked), str(answered)),
            log or Path(folder, "log.txt"),
            environ=environ,
            limit_s=limit_s,
        )
        answer = json.loads(answered.read_text()) if answered.exists() else {}
        if answer.get("verdict", LATE) == LATE:  # ended before its last word
            ended = {"verdict": LATE, "why": f"not done after {limit_s:.0f} s"} if code is None and limit_s else None
            answer |= ended or {"verdict": FAILED, "why": f"exit code {code}: {last_words(said)}"}
    return answer | {"seconds": time.perf_counter() - began}


def keep(ask: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Keep the findings of a case so far: its answer if it is ended now. Where rows are missing, `verdict` is "out of time".

    A caller in the same process gets them through `ask["tell"]`, a function of the answer.
    """
    if "answer" in ask:  # asked by `apart`
        write_atomic(Path(ask["answer"]), json.dumps(answer))
    if "tell" in ask:
        ask["tell"](answer)


def run(
    command: list[str], log: Path, *, environ: Mapping[str, str] | None = None, limit_s: float | None = None
) -> tuple[int | None, str]:
    """(exit code, None where time ran out; everything it printed) of a program that can import this package.

    The child is gone when this returns or raises, Ctrl-C included, with all that it started: its own cases end with it, and
    what else is in its session is killed.
    """
    environ = dict(os.environ if environ is None else environ)
    environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(REPO), environ.get("PYTHONPATH", "")) if p)
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = [sys.executable, "-I", "-c", WITH_PARENT] if sys.platform == "linux" else []
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*begin, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def program(name: str, *args: str) -> list[str]:
    """The command line of one of our commands, in this interpreter."""
    return [sys.executable, "-m", f"jaxtrain.{name}", *args]


def last_words(said: str) -> str:
    """The end of what a program printed: for a Python error its last line and where it was raised."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-LAST_WORDS:] or "it printed nothing"


def main(argv: list[str]) -> int:
    """KIND ASK ANSWER: what a child runs."""
    kind, asked, answered = argv
    module, _, function = CASES[kind].partition(":")
    answer = getattr(importlib.import_module(module), function)(json.loads(Path(asked).read_text()))
    write_atomic(Path(answered), json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
