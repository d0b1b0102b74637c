"""The campaign's ledger: when each test last ran, at which commit, and with which result.

    ./run.sh test --campaign[=MINUTES]     run everything: tests without a proof first, then the oldest proof first
    ./run.sh test --ledger                 list the tests that were never proved, or last more than 10 commits ago

Each result is a JSON line: item (the test's id), commit, date (UTC), seconds, result (passed, failed, skipped), why (of a
skip). A test is proved if it passed while no tracked file had uncommitted changes.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("JAXTRAIN_TEST_LEDGER") or "~/.cache/jaxtrain/tests").expanduser()
FILE = FOLDER / "ledger.jsonl"
OLD = 10  # a proof older than this many commits is listed
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
CHANGED = "+"  # mark at the end of the commit, if the tree has uncommitted changes
SHOWN = 20  # most tests in a list


def is_campaign(config: pytest.Config) -> bool:
    """Return whether pytest runs a campaign or lists the ledger."""
    return config.getoption("--campaign") is not None or bool(config.getoption("--ledger"))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the ledger: the result of one run of a test."""

    item: str
    commit: str
    date: str
    seconds: float
    result: str
    why: str = ""


def read(path: Path = FILE) -> list[Entry]:
    """Return all entries, oldest first. A line that was cut off in the middle of writing is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return entries


def append(entry: Entry, path: Path = FILE) -> None:
    """Append an entry, and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(dataclasses.asdict(entry)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def proofs(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the last proof of each test: the newest entry that passed on an unchanged commit, unless a later entry failed."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.result == PASSED and not entry.commit.endswith(CHANGED):
            found[entry.item] = entry
        elif entry.result == FAILED:
            found.pop(entry.item, None)
    return found


def now() -> str:
    """Return the time, in UTC to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """Return the commit of the tree, with CHANGED if tracked files differ from it; "" outside of a git repository."""
    head = _git("rev-parse", "HEAD")
    return head + (CHANGED if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def age(commit: str) -> int | None:
    """Return the number of commits since `commit`; None if the current history does not contain it."""
    if not commit or _git("merge-base", "--is-ancestor", commit, "HEAD", code=True) != "0":
        return None
    return int(_git("rev-list", "--count", f"{commit}..HEAD"))


def _git(*command: str, code: bool = False) -> str:
    done = subprocess.run(["git", *command], cwd=REPO, capture_output=True, text=True)
    return str(done.returncode) if code else done.stdout.strip()


def order(groups: dict[str, Sequence[str]], known: dict[str, Entry], salt: str) -> list[str]:
    """Return the names of groups of tests in the order in which a campaign runs them.

    Groups with a test that was never proved come first, in an order that `salt` (the commit) determines. So where no ledger is
    kept, as in CI, a campaign with a time limit runs different tests at each commit. The other groups follow, the oldest proof
    first.
    """

    def key(name: str) -> tuple[str, str]:
        oldest = min((known[item].date if item in known else "" for item in groups[name]), default="")
        return oldest, hashlib.sha256(f"{salt} {name}".encode()).hexdigest()

    return sorted(groups, key=key)


def summary(items: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """Return lines of text: which of `items` were never proved, and which were last proved more than OLD commits ago."""
    known = proofs(entries)
    ages = {at: age(at) for at in {e.commit for e in known.values()}}
    skipped = {e.item: e.why for e in entries if e.result == SKIPPED}
    never = [i for i in items if i not in known]
    old = [i for i in items if i in known and (ages[known[i].commit] is None or ages[known[i].commit] > OLD)]
    failed = {e.item for e in entries if e.result == FAILED} & {*never}
    lines = [
        f"ledger: {len(items):,} tests, {len(items) - len(never) - len(old):,} proved in the last {OLD} commits, "
        f"{len(old):,} before that, {len(never):,} never ({len(failed):,} of them failed, "
        f"{sum(i in skipped for i in never):,} were skipped)"
    ]
    for title, which in (("never proved", never), (f"last proved more than {OLD} commits ago", old)):
        lines += [f"  {title}: {i}{f' (skipped: {skipped[i]})' if i in skipped else ''}" for i in which[:SHOWN]]
        lines += [f"  {title}: and {len(which) - SHOWN:,} more"] * (len(which) > SHOWN)
    return lines
