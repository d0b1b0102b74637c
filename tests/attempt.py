"""Stand in for the trainer and for preflight in tests of the supervisor: a process that follows a plan.

Each process runs the next line of the file `plan` in $HOME:

    exit CODE            exit with this code
    kill NUMBER          kill itself with this signal
    traced CODE          exit after a SIGUSR2
    read CODE            exit after it has read a line from stdin
    note CODE            exit after it has written a note that no further attempt should start
    until CODE [COUNT]   exit after COUNT signals (1 by default) that ask a run to end: SIGINT, SIGTERM or SIGUSR1

A process exits with code 99 if it waits for more than HUNG_S seconds. Each process adds a JSON line with its id, arguments and
environment to the file `attempts`, and the name of each signal to the file `signals`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

HUNG_S = 120
NAMES = "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"
VARIABLES = "RESTART", "LAUNCHED", "PREFLIGHT"

asked: list[int] = []
traced: list[int] = []


def hear(number: int, _frame: FrameType | None) -> None:
    with open("signals", "a") as file:
        file.write(signal.Signals(number).name + "\n")
    (traced if number == signal.SIGUSR2 else asked).append(number)


def wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + HUNG_S
    while not condition():
        if time.monotonic() > limit:
            sys.exit(99)
        time.sleep(0.01)


def main() -> int:
    os.chdir(os.environ["HOME"])
    at_birth = {name: str(signal.getsignal(getattr(signal, name))) for name in (*NAMES, "SIGQUIT", "SIGHUP")}
    for name in NAMES:
        signal.signal(getattr(signal, name), hear)
    attempts, plan = Path("attempts"), Path("plan").read_text().splitlines()
    before = attempts.read_text() if attempts.exists() else ""
    action, code, *rest = plan[before.count("\n")].split()
    facts = {"pid": os.getpid(), "arguments": sys.argv[1:], "at_birth": at_birth, "group": os.getpgrp()}
    facts |= {name.lower(): os.environ.get("JAXTRAIN_" + name) for name in VARIABLES}
    if all(os.isatty(i) for i in range(3)):
        facts["foreground"] = os.tcgetpgrp(0)
    if action == "read":
        facts["line"] = sys.stdin.readline()
    Path("attempts.new").write_text(before + json.dumps(facts) + "\n")
    Path("attempts.new").rename(attempts)
    if action == "kill":
        if int(code) != signal.SIGKILL:
            signal.signal(int(code), signal.SIG_DFL)
        os.kill(os.getpid(), int(code))
    if action == "note":
        Path(os.environ["JAXTRAIN_NOTE"]).write_text("the time is over\n")
    if action == "traced":
        wait(lambda: bool(traced))
    if action == "until":
        wait(lambda: len(asked) >= int(rest[0] if rest else 1))
    # The exit code is decided: later signals have no effect.
    signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in NAMES])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
