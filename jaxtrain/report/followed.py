"""What is known of a run while it is followed: its files are read as they grow, or are replaced, and nothing else."""

import itertools
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxtrain import metrics
from jaxtrain.progress import duration
from jaxtrain.report.run import QUIET_S, Run, last_words, read, verdict

SLOW_S = 5.0  # from one look at what takes longer to read to the next: ledger, log
RESTARTED = (75, 124)  # exit codes after which a launcher starts the run again
AGAIN_S = 600.0  # that a follower waits for that, and for the next attempt of a run that is taken for dead
RECENT = 200  # train lines that the time left is reckoned from


class Tail:
    """The whole lines of a metrics.jsonl that grows, is cut, or is replaced by another file of its name."""

    CHECKED = 512  # bytes before the place reached, which tell that it is still the same file

    def __init__(self, path: Path):
        self.path = path
        self._place = 0
        self._before = b""
        self._inode: int | None = None

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether it begins anew: what was given before no longer counts, the lines that are new).

        Raises MetricsError for a whole line that is none of metrics.
        """
        try:
            with open(self.path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._place - len(self._before))
                same = inode == self._inode and file.read(len(self._before)) == self._before
                anew = not same and self._inode is not None
                if not same:
                    self._place, self._inode = 0, inode
                file.seek(self._place)
                read = file.read()
        except FileNotFoundError:
            return False, []
        whole = read[: read.rfind(b"\n") + 1]
        self._place += len(whole)
        self._before = (whole if not same else self._before + whole)[-self.CHECKED :]
        try:
            return anew, [metrics.decode(text) for text in whole.splitlines()]
        except ValueError as error:
            raise metrics.MetricsError(f"{self.path}: not a line of metrics ({error}). Repair or delete the line.") from error


class Followed:
    """What is known of a run that is followed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run: Run = read(folder)
        self._tails: dict[Path, Tail] = {}
        self._slow = 0.0
        self._forget()

    def _forget(self) -> None:
        self.train: list[dict[str, Any]] = []
        self.evals: dict[str, dict[str, Any]] = {}
        self.gpus: dict[tuple[int, int], dict[str, Any]] = {}

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether its metrics begin anew, its new lines). How it stands is read first: behind an end come no lines."""
        self.run = last_words(self.run)
        for path in sorted(self.folder.glob("metrics*.jsonl")):
            numbered = path.stem == "metrics" or path.stem.removeprefix("metrics.").isdecimal()
            if numbered and path not in self._tails:
                self._tails[path] = Tail(path)
        back, found = False, []
        for path, tail in self._tails.items():
            anew, lines = tail.poll()
            if anew and path.stem == "metrics":
                back = True
                self._forget()
            for line in lines:
                self._take(line)
            found += lines
        if time.monotonic() - self._slow >= SLOW_S:
            self._slow = time.monotonic()
            self.run = last_words(self.run, slow=True)
        return back, found

    def _take(self, line: dict[str, Any]) -> None:
        if line["kind"] == "train":
            self.train.append(line)
        elif line["kind"] == "eval":
            self.evals[line.get("set", "")] = line
        elif line["kind"] == "gpu":
            self.gpus[line["process"], line["gpu"]] = line

    @property
    def left_s(self) -> float | None:
        """Until its last step, at the pace of its last lines: evaluations and saves among them take their time again, and what
        lay between two attempts does not. None where that is not known, and for a run that is not alive."""
        if not self.run.steps or not self.run.alive:
            return None
        attempts = self.run.opened.attempts if self.run.receipt else ()
        starts = [datetime.fromisoformat(one["started"]).timestamp() for one in attempts if one.get("started")]
        steps, seconds = 0, 0.0
        for one, after in itertools.pairwise(self.train[-RECENT:]):
            if not any(one["time_unix"] < start <= after["time_unix"] for start in starts):
                steps += after["step"] - one["step"]
                seconds += after["time_unix"] - one["time_unix"]
        return (self.run.steps - self.train[-1]["step"]) * seconds / steps if steps > 0 else None

    @property
    def given_up(self) -> bool:
        """Whether it has died without an end, and was not started again for as long as that is waited for."""
        silent = self.run.silent_s
        return not self.run.ended and silent is not None and silent > QUIET_S[bool(self.run.ledger)] + AGAIN_S

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected."""
        if not self.run.ended:
            return self.given_up
        waited = self.run.silent_s is not None and self.run.silent_s > AGAIN_S
        return self.run.receipt.get("exit_code") not in RESTARTED or waited

    @property
    def stands(self) -> str:
        """How it stands, in words."""
        words = verdict(self.run, self.train[-1]["step"] if self.train else 0)[1]
        if self.given_up:
            return f"{words}. Not started again within {duration(AGAIN_S)}: no longer followed"
        if self.over or self.run.alive or self.run.silent_s is None:
            return words
        return f"{words}. Waiting for it to be started again"
