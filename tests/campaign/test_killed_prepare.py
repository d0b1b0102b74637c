"""If `prepare` is killed or out of disk space, it leaves no token file. After a kill, the command continues."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from token_files import finished, write_lines

from jaxtrain.commands.data import main
from jaxtrain.data import prepare
from jaxtrain.data.tokenfile import TokenFile, verify_file


def start(folder: Path, *args: str, program: str = "") -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "jaxtrain", "data"]
    return subprocess.Popen([*command, "prepare", *args], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, "ended before it could be stopped: " + process.communicate()[1]
        time.sleep(0.002)


def writing(folder: Path) -> list[int]:
    """Return the ids of the processes that are writing a part of a.tok."""
    return [int(path.suffix[1:]) for path in (folder / "a.tok.partial").glob("*.tok.*")]


def children(pid: int) -> list[int]:
    """Return the ids of the children of process `pid` that read shards."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in found if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]


def test_killed_and_started_again_gives_the_same_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 80)
    args = ("--input=a.jsonl", "--output=a.tok", "--validation=0.1", "--processes=2", "--shard-mb=0.4")
    process = start(tmp_path, *args)
    wait_for(lambda: len(finished(tmp_path)) >= 3, process)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ended = time.monotonic() + 60
    while workers := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ended, "workers outlive the run"
        time.sleep(0.01)
    process.stderr.close()
    assert not list(tmp_path.glob("*.tok"))
    done = {p: p.stat().st_mtime_ns for p in finished(tmp_path)}
    assert done
    again = start(tmp_path, *args)
    error = again.communicate(timeout=300)[1]
    assert again.returncode == 0, error
    assert int(re.search(r"(\d+) of \d+", error)[1]) >= len(done)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.tok", "a.val.tok"]
    prepare.prepare_corpus([f"{tmp_path}/a.jsonl"], tmp_path / "b.tok", validation=0.1)
    for one, other in (("a.tok", "b.tok"), ("a.val.tok", "b.val.tok")):
        files = [TokenFile.open(tmp_path / name) for name in (one, other)]
        assert files[0].header["content_sha256"] == files[1].header["content_sha256"]
        assert verify_file(tmp_path / one) == ""


def test_a_process_that_dies_is_an_error_and_the_rest_is_kept(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 80)
    args = ("--input=a.jsonl", "--output=a.tok", "--processes=2", "--shard-mb=0.4")
    process = start(tmp_path, *args)
    victims = []
    wait_for(lambda: len(finished(tmp_path)) >= 2 and victims.extend(writing(tmp_path)) is None and victims, process)
    os.kill(victims[0], signal.SIGKILL)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 1, error
    assert "--processes" in error and "a.tok.partial" in error
    assert not list(tmp_path.glob("*.tok"))
    assert finished(tmp_path)


def test_a_full_disk_is_an_error_that_leaves_no_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 100)
    # a limit on the size of files replaces a full disk
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21)); "
    program = f"{limit}import sys; from jaxtrain.commands.data import main; sys.exit(main(sys.argv[1:]))"
    # while a part is written, or while parts are merged
    for shard_mb, left in ((64, ["a.jsonl"]), (1, ["a.jsonl", "a.tok.partial"])):
        process = start(
            tmp_path, "--input=a.jsonl", "--output=a.tok", f"--shard-mb={shard_mb}", "--processes=1", program=program
        )
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 1, error
        assert os.strerror(errno.EFBIG) in error and "--output = a.tok" in error
        assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert main(["prepare", f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/a.tok", "--shard-mb=1", "--processes=1"]) == 0
