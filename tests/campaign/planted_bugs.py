"""Plant one-line bugs, one at a time, and check that the tests find each.

    python tests/campaign/planted_bugs.py              try all; print a line each, and the share that tests found
    python tests/campaign/planted_bugs.py clip digest  try those whose names contain a given word
    python tests/campaign/planted_bugs.py --sample=40  try 40, by turns: as many commits later, the next 40

Each bug is planted in a copy of the repository, and the tests in `Bug.tests` run in this copy. If they pass, a test is missing:
write one that fails. To add a bug, append it to the file of its part in bugs/.

A process that has imported the packages, but nothing of the repository, forks for each bug: its tests begin at once, and no
bug leaves anything behind. --workers (default 2) processes do so, each with a copy of its own.
"""

import argparse
import ast
import builtins
import contextlib
import importlib
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import symtable
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bugs import Bug, all_bugs

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxtrain", "tests", "configs", "docs", "benchmarks", "requirements", "deploy", "notebooks")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "run.sh", ".python-version")
LIMIT_S = 600
SHUFFLED = 20261128  # the order of samples: neighbours in bugs/ name the same tests
TESTS = ("unit/", "proofs/", "gpu/", "campaign/")  # of tests
NOTICED, SURVIVED, SKIPPED = "noticed", "SURVIVED", "skipped"  # verdicts
ALL_SKIPPED = 64  # exit code, beside pytest's: no test failed, and none passed


def stale() -> list[str]:
    """Return a line for each entry of bugs/ that no longer fits: its text does not occur once, it leaves a name undefined, or
    its tests do not exist.
    """
    bugs = all_bugs()
    names = [bug.name for bug in bugs]
    problems = [f"{name}: a second bug of this name" for name in {*names} if names.count(name) > 1]
    sources = {bug.file: (REPO / bug.file).read_text() if (REPO / bug.file).exists() else "" for bug in bugs}
    for bug in bugs:
        if (count := sources[bug.file].count(bug.text)) != 1:
            problems.append(f"{bug.name}: {bug.text!r} occurs {count} times in {bug.file}, and must occur once")
        if bug.text == bug.instead:
            problems.append(f"{bug.name}: changes nothing")
        files = [word for word in shlex.split(bug.tests) if word.startswith(TESTS)]
        missing = [file for file in files if not (REPO / "tests" / file.partition("::")[0]).exists()]
        if missing or not files:
            problems.append(f"{bug.name}: no file {' '.join(missing) or 'of tests/unit, proofs or gpu'} ({bug.tests})")
        if bug.file.endswith(".py") and (names := undefined_names(sources[bug.file].replace(bug.text, bug.instead))):
            problems.append(f"{bug.name}: leaves {', '.join(names)} undefined: tests would notice that, not the bug")
    return problems


def undefined_names(text: str) -> set[str]:
    """Return the global names that a module reads and does not define."""
    module = symtable.symtable(text, "module", "exec")
    defined = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_local()} | {*dir(builtins), "__file__"}

    def read(table: symtable.SymbolTable) -> set[str]:
        names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        return names.union(*map(read, table.get_children()))

    return read(module) - defined


def copy_repository(root: Path) -> None:
    """Copy all files that the tests of a bug read into the folder `root`."""
    for name in (*FOLDERS, *FILES):
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # another process writes these
        else:
            shutil.copy(source, root / name)
    # tests start commands with the environment of the repository that they are in
    (root / ".venv").symlink_to(Path(sys.prefix))


def import_packages() -> None:
    """Import the packages that modules of jaxtrain and of the tests import, but none of the repository's own modules."""
    names = {"pytest", "xdist.plugin", "hypothesis.strategies"}
    for file in [*(REPO / "jaxtrain").rglob("*.py"), *(REPO / "tests").rglob("test_*.py")]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = {path.stem for folder in (REPO, REPO / "tests", *(REPO / "tests").iterdir()) for path in folder.glob("*")}
    for name in sorted(names):
        if name.partition(".")[0] not in own:
            with contextlib.suppress(ImportError):  # a name that is a function of its module, or a package of another platform
                importlib.import_module(name)


class Outcomes:
    """A plugin of pytest that counts the tests that passed. The text of a summary depends on options."""

    passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed


def run_tests(words: list[str], root: Path, output: Path) -> int:
    """Run pytest in a fork of this process, in the copy `root`, and return its exit code, or ALL_SKIPPED.

    Raises TimeoutError if it does not end within LIMIT_S.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(root)
            os.environ |= {"PYTHONPATH": str(root), "JAXTRAIN_TEST_LEDGER": str(root / "ledger")}
            import pytest

            here = {REPO, REPO / "tests", REPO / "tests" / "campaign"}
            sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() not in here)]
            for name, module in [*sys.modules.items()]:
                if str(getattr(module, "__file__", "")).startswith(str(REPO / "tests")):
                    del sys.modules[name]

            outcomes = Outcomes()
            code = int(pytest.main(["-n0", "-x", "-q", "-p", "no:cacheprovider", *words], [outcomes]))
            code = ALL_SKIPPED if code == 0 and not outcomes.passed else code
            sys.stdout.flush()
        finally:
            os._exit(code)
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"the tests did not end in {LIMIT_S} s")


def verdict_on(bug: Bug, root: Path) -> str:
    """Return NOTICED if the tests of a bug fail while it is planted in the copy `root`, SURVIVED if they pass.

    SKIPPED: this machine skips all of them, as those of pages without a browser.

    Raises RuntimeError if no test ran, and TimeoutError if the tests do not end within LIMIT_S.
    """
    file = root / bug.file
    before = file.read_text()
    output = root / "output.txt"
    try:
        file.write_text(before.replace(bug.text, bug.instead))
        words = [f"tests/{word}" if word.startswith(TESTS) else word for word in shlex.split(bug.tests)]
        code = run_tests(words, root, output)
    finally:
        file.write_text(before)
        # otherwise the next bug of the same file, size and second would be tried with it
        for bytecode in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            bytecode.unlink()
    text = output.read_text()
    # an error of a fixture or of an import ends pytest with 1 or 2 too, although no test failed
    if code not in (0, 1, ALL_SKIPPED) or (code == 1 and "FAILED" not in text):
        raise RuntimeError(f"pytest ended with {code}:\n{text[-2000:]}")
    return {0: SURVIVED, 1: NOTICED, ALL_SKIPPED: SKIPPED}[code]


def work(bugs: Any, results: Any) -> None:
    """Try the bugs that come from a queue, in a copy of the repository, until None comes."""
    import_packages()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy_repository(Path(folder))
        while (bug := bugs.get()) is not None:
            began, why = time.monotonic(), ""
            try:
                verdict = verdict_on(bug, Path(folder))
            except (RuntimeError, TimeoutError) as error:
                verdict, why = "FAILED", f": {error}"
            results.put((bug, verdict, time.monotonic() - began, why))


def sample(bugs: list[Bug], size: int, turn: int) -> list[Bug]:
    """Return `size` of the bugs: the samples of the turns after one another go through all of them, in a fixed random order."""
    import random

    order = random.Random(SHUFFLED).sample(bugs, len(bugs))
    return [order[(turn * size + i) % len(order)] for i in range(min(size, len(order)))]


def main(arguments: list[str]) -> int:
    """Return 0 if tests find each bug that was tried, 1 if not, 2 if an entry does not fit the code or no bug was chosen."""
    parser = argparse.ArgumentParser(prog="planted_bugs.py", description="Plant bugs, and check that tests notice them.")
    parser.add_argument("words", nargs="*", help="only the bugs whose names contain one of these")
    parser.add_argument("--tests", metavar="FILE", default="", help="only the bugs whose tests name this file, as test_moe")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, by turns")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args(arguments)
    if problems := stale():
        print(*problems, sep="\n")
        return 2
    chosen = [bug for bug in all_bugs() if not options.words or any(word in bug.name for word in options.words)]
    chosen = [bug for bug in chosen if options.tests in bug.tests]
    if options.sample:
        turn = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout
        chosen = sample(chosen, options.sample, int(turn or 0))
    if not chosen:
        print("no bug has such a name")
        return 2
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for bug in [*chosen, *[None] * options.workers]:
        queue.put(bug)
    workers = [context.Process(target=work, args=(queue, results)) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    verdicts, began = Counter(), time.monotonic()
    for i in range(len(chosen)):
        bug, verdict, seconds, why = results.get()
        verdicts[verdict] += 1
        print(f"{i + 1:4}/{len(chosen)}  {verdict:8}  {seconds:5.1f} s  {bug.name} ({bug.tests}){why}", flush=True)
    for worker in workers:
        worker.join()
    tried, noticed = len(chosen) - verdicts[SKIPPED], verdicts[NOTICED]
    skipped = f"; the tests of {verdicts[SKIPPED]} are skipped on this machine" if verdicts[SKIPPED] else ""
    print(f"{noticed} of {tried} planted bugs were noticed, in {time.monotonic() - began:.0f} s{skipped}")
    return 0 if noticed == tried else 1


if __name__ == "__main__":
    sys.path.append(str(REPO / "tests"))
    from compile_options import EIGHT_CPUS

    os.environ.update(EIGHT_CPUS)  # before packages are imported, JAX among them
    sys.exit(main(sys.argv[1:]))
