"""Preflight on a live node, with a script as nvidia-smi: hanging commands are killed, and a record gives the same verdict."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from nodes import H200, a_plain_environment, faults  # noqa: F401

from jaxtrain.preflight import __main__ as command
from jaxtrain.preflight import inspection, node, nvidia_smi
from jaxtrain.preflight.node import ABSENT, TIMED_OUT, Answer, LocalNode, file_name
from jaxtrain.preflight.table import FAULT, OK


def fake_smi(tmp_path: Path, body: str) -> str:
    """Return a folder for PATH with fakes of nvidia-smi and dmesg, which run `body`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("nvidia-smi", "dmesg"):
        script = folder / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_command_that_hangs_is_given_up(tmp_path, monkeypatch, capsys):
    # The child process keeps its parent's output open, as a shell script's child would.
    monkeypatch.setenv("PATH", fake_smi(tmp_path, "sleep 1000 & sleep 1000"))
    code = command.main(["--limit=2", "--json", f"--workdir={tmp_path}"])  # a command gets half of the limit
    (fault,) = [c for c in faults(json.loads(capsys.readouterr().out)) if c["name"] == "nvidia-smi"]
    assert code == 3 and fault["seen"] == f"no answer in time to any of {len(nvidia_smi.COMMANDS)} commands"


def test_no_command_is_left_behind(tmp_path, monkeypatch, capsys):
    """Hanging commands are killed, even those that no check waited for."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("PATH", fake_smi(tmp_path, f"echo $$ >> {pids}; exec sleep 300"))
    command.main(["--limit=4", "--no-measure", "--json", f"--workdir={tmp_path}"])
    capsys.readouterr()
    started = pids.read_text().split()
    until = time.monotonic() + 60
    while (left := [pid for pid in started if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert started and not left


def alive(pid: str) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_commands_run_at_the_same_time_and_say_why_they_failed(tmp_path, monkeypatch):
    """Each fake command waits until all have started, and then fails. Each answer has the command's exit code and output."""
    begun = tmp_path / "begun"
    begun.mkdir()
    all_begun = f"[ $(ls {begun} | wc -l) -ge {len(inspection.COMMANDS)} ]"
    monkeypatch.setenv(
        "PATH", fake_smi(tmp_path, f"touch {begun}/$$; until {all_begun}; do sleep 0.05; done; echo so it is; exit 9")
    )
    local = LocalNode({}, command_s=300.0)
    local.start(inspection.COMMANDS)
    answers = [local.run(each) for each in inspection.COMMANDS]
    assert {(a.code, a.error) for a in answers} == {(9, "so it is")}
    assert local.run("no-such-command-here").code == ABSENT and not Answer(TIMED_OUT).succeeded


def test_what_is_recorded_is_judged_alike(tmp_path, monkeypatch, capsys):
    """nvidia-smi answers as on the healthy node. A record gives the checks of the live run that wrote it, and contains no
    secrets.
    """
    answers = tmp_path / "answers"
    answers.mkdir()
    for each in inspection.COMMANDS:
        if (kept_ := H200 / "commands" / file_name(each)).exists():
            shutil.copyfile(kept_, answers / kept_.name)
    look = f'exec {sys.executable} -c "{SAY}" {answers} "$(basename "$0")" "$@"'
    monkeypatch.setenv("PATH", fake_smi(tmp_path, look))
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("https_proxy", "http://me:hush@proxy:3128")
    kept = tmp_path / "kept"
    common = ["--json", "--no-measure", f"--workdir={tmp_path}"]
    command.main([*common, f"--record={kept}"])
    live_ = json.loads(capsys.readouterr().out)
    command.main([*common, f"--recorded={kept}"])
    again = json.loads(capsys.readouterr().out)
    assert live_["nodes"][0]["checks"] == again["nodes"][0]["checks"]
    states = {c["name"]: c["state"] for c in live_["nodes"][0]["checks"]}
    assert (states["topology"], states["ECC"], states["variables"]) == (OK, OK, FAULT)
    texts = [path.read_text() for path in kept.rglob("*") if path.is_file()]
    assert not [text for text in texts if "hush" in text] and any("http://proxy:3128" in text for text in texts)


SAY = (
    "import pathlib, sys; from jaxtrain.preflight.node import file_name; "
    "p = pathlib.Path(sys.argv[1]) / file_name(' '.join(sys.argv[2:])); "
    "t = p.read_text() if p.exists() else sys.exit(2); sys.stdout.write(t.split(chr(10), 2)[2])"
).replace('"', '\\"')


def test_this_machine(tmp_path, capsys):
    """Preflight runs on the real machine. Its verdict is unknown here, but its output has the documented form."""
    file = tmp_path / "preflight.json"
    code = command.main([f"--json={file}", f"--workdir={tmp_path}", "--no-measure"])
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert code == found["exit_code"] and found["verdict"] in ("fit", "fault", "no GPUs") and said.rstrip()
    assert set(found) == {"format", "verdict", "exit_code", "seconds", "time", "nodes"}
    assert {"name", "state", "expected", "seen", "why", "fix", "node"} == set(found["nodes"][0]["checks"][0])
    disks = LocalNode({"checkpoints": str(tmp_path / "not" / "there"), "bucket": "gs://b/x"}).disks
    assert disks["checkpoints"].total_gib > 0 and disks["checkpoints"].kind != "unknown" and "bucket" not in disks
    assert node.clock_synchronised() in (True, False, None)
