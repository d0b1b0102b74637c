"""deploy/slurm.sbatch: its options are Slurm's, and the script runs whole, with stand-ins for `srun`, `scontrol` and run.sh.

There is no Slurm here; what it does is taken from its manual pages.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_deploy import AGAIN, DEPLOY, FOR_GOOD, REPO, parsed, tool

from jaxtrain.distributed import detect

# Long options of sbatch and the form of their values, '' where they take none: Slurm 26.11, src/common/slurm_opt.c and
# doc/man/man1/sbatch.1. Those of the script, and those that a site adds. 23.02 has them all; `--export=NIL` came with it.
LIST = r"[\w.,\[\]&|*-]+"
FORMS = {
    "account": r"[\w.-]+",
    "chdir": r"\S+",
    "constraint": LIST,
    "error": r"([\w./-]|%[AaJjNnstuxrb%])+",
    "exclude": LIST,
    "exclusive": "(user|mcs|topo)?",
    "export": r"ALL|NIL|NONE|(ALL,)?\w+(=[^,]*)?(,\w+(=[^,]*)?)*",
    "gpus-per-node": r"(\w+:)?\d+",
    "job-name": r"[\w.-]+",
    "mail-type": r"[A-Z_0-9]+(,[A-Z_0-9]+)*",
    "mem": r"\d+[KMGT]?",
    "nodelist": LIST,
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"([\w./-]|%[AaJjNnstuxrb%])+",
    "partition": LIST,
    "propagate": r"(ALL|NONE|[A-Z]+(,[A-Z]+)*)?",
    "qos": r"[\w.-]+",
    "requeue": "(expedite)?",
    "reservation": LIST,
    "signal": r"([RB]+:)?(?P<signal>[A-Z]+[12]?|\d+)(@(?P<seconds>\d+))?",
    "switches": r"\d+(@[\d:-]+)?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}


def directives(text: str) -> tuple[dict[str, str], list[str]]:
    """Option -> value of the #SBATCH lines, and those that sbatch would not take, or not see."""
    found, wrong = {}, []
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    for i, line in enumerate(lines):
        if not re.match(r"\s*#\s*SBATCH\b", line):
            continue
        option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        name, value = (option[1], option[2] or "") if option else ("", "")
        # sbatch reads no further than the first command.
        if name not in FORMS or name in found or i > first_command or not re.fullmatch(FORMS[name], value):
            wrong.append(line)
        found[name] = value
    return found, wrong


SBATCH = (DEPLOY / "slurm.sbatch").read_text()


def test_sbatch_options_are_slurms():
    options, wrong = directives(SBATCH)
    assert not wrong and len(options) == SBATCH.count("\n#SBATCH ") == 13
    # One task a node over all its GPUs; saved before the limit by every run.sh (no "B:"); restarted; nothing inherited.
    assert (options["ntasks-per-node"], options["gpus-per-node"], options["mem"]) == ("1", "8", "0")
    assert {"exclusive", "requeue"} <= set(options)
    assert (options["export"], options["propagate"], options["open-mode"]) == ("NIL", "NONE", "append")
    warning = re.fullmatch(FORMS["signal"], options["signal"])
    assert warning and warning["signal"] in ("USR1", "TERM") and ":" not in options["signal"]
    # run.sh does not start again in the last ten minutes of a job, so the signal must come within them.
    assert 120 <= int(warning["seconds"]) <= 600


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --ntask-per-node=1",
        "#SBATCH --signal=USR1:300",
        "#SBATCH --time=1day",
        "#SBATCH --nodes",
        "# SBATCH --mem=0",
        "#SBATCH --open-mode=appended",
    ],
)
def test_sbatch_options_that_slurm_would_not_take_are_found(line: str):
    assert directives(f"#!/bin/bash\n{line}\ntrue\n")[1] == [line]


def test_sbatch_options_after_a_command_are_found():
    assert directives("#!/bin/bash\ntrue\n#SBATCH --mem=0\n")[1]


def test_shellcheck():
    done = subprocess.run([tool("shellcheck"), str(DEPLOY / "slurm.sbatch")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Runs its command once a node, as srun does, and ends with the highest exit code. Notes its own options.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>"$SLURM_SUBMIT_DIR/srun-options"; shift; done
highest=0 tasks=()
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do
  SLURM_PROCID=$i SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_STEP_NODELIST="gpu[01-09]" SLURM_STEP_TASKS_PER_NODE="1(x9)" "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do
  code=0
  wait "$task" || code=$?
  ((code <= highest)) || highest=$code
done
exit "$highest"
"""
# A run that ends as the file of its number says: with a code, or `wait` until SIGUSR1 and then with 75.
RUN = """#!/bin/bash
echo $$ >"task-$SLURM_PROCID"
for argument; do echo "$argument"; done >"arguments-$SLURM_PROCID"
env -0 >"environment-$SLURM_PROCID"
read -r plan <"plan-$SLURM_PROCID"
if [[ $plan == wait ]]; then
  trap 'exit 75' USR1
  touch "listens-$SLURM_PROCID"
  for _ in {1..200}; do sleep 0.05; done
fi
exit "$plan"
"""


class Job:
    """The batch script as Slurm would start it, on two nodes: with Slurm's variables and no others."""

    def __init__(self, folder: Path):
        self.folder = folder / "a folder"
        self.bin = folder / "bin"
        for path, text in (
            (self.bin / "srun", SRUN),
            (self.bin / "scontrol", '#!/bin/bash\necho "$@" >>"$SLURM_SUBMIT_DIR/requeued"\nexit "${FAKE_SCONTROL:-0}"\n'),
            (self.folder / "run.sh", RUN),
        ):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def begin(self, *plans: str | int, arguments: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
        for i, plan in enumerate(plans):
            (self.folder / f"plan-{i}").write_text(f"{plan}\n")
        slurm = {"JOB_ID": "4711", "JOB_NAME": "llama3_8b", "JOB_NUM_NODES": str(len(plans)), "JOB_USER": "ada"}
        base = {f"SLURM_{key}": value for key, value in slurm.items()}
        base |= {"SLURM_SUBMIT_DIR": str(self.folder), "PATH": f"{self.bin}:/usr/bin:/bin"}
        return subprocess.Popen(
            ["bash", str(DEPLOY / "slurm.sbatch"), *arguments],
            env=base | env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *plans: str | int, arguments: tuple[str, ...] = (), **env: str) -> tuple[int, str, list[str]]:
        """(exit code, stderr, what scontrol was asked)."""
        process = self.begin(*plans, arguments=arguments, **env)
        stderr = process.communicate(timeout=30)[1]
        asked = self.folder / "requeued"
        return process.returncode, stderr, asked.read_text().splitlines() if asked.exists() else []

    def words(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, *FOR_GOOD])
def test_a_job_that_ended_for_good_is_not_queued_again(job: Job, code: int):
    assert job.run(0, code) == (code, "", [])


@pytest.mark.parametrize("code", AGAIN)
def test_a_job_that_asks_for_it_is_queued_again(job: Job, code: int):
    ended, stderr, asked = job.run(75, code, SLURM_RESTART_COUNT="3")
    assert ended == code
    assert asked == ["requeue Incomplete 4711"]
    assert stderr == f"slurm.sbatch: exit {code}: queued again, time 4 of 20\n"


def test_one_node_that_is_unfit_ends_the_job_for_good(job: Job):
    assert job.run(75, 76)[::2] == (76, [])


def test_queueing_again_is_bounded(job: Job):
    assert job.run(75, SLURM_RESTART_COUNT="19")[2]
    (job.folder / "requeued").unlink()
    code, stderr, asked = job.run(75, SLURM_RESTART_COUNT="20")
    assert (code, asked) == (75, [])
    assert "not queued again, after 20 times (most_requeues=20)" in stderr


def test_a_requeue_that_slurm_refuses_fails_the_job(job: Job):
    assert job.run(75, FAKE_SCONTROL="1")[0] != 0


def test_the_signal_before_the_time_limit(job: Job):
    """Slurm sends it to the tasks of the step, not to the batch script."""
    process = job.begin("wait", "wait")
    for i in range(2):
        wait_for(lambda i=i: (job.folder / f"listens-{i}").exists())
        os.kill(int(*job.words(f"task-{i}")), signal.SIGUSR1)
    assert process.wait(timeout=20) == 75
    assert job.words("requeued") == ["requeue Incomplete 4711"]
    process.communicate()


def test_submitted_from_another_folder(job: Job, tmp_path: Path):
    (tmp_path / "other").mkdir()
    code, stderr, asked = job.run(0, SLURM_SUBMIT_DIR=str(tmp_path / "other"))
    assert (code, asked) == (2, []) and f"no run.sh in {tmp_path / 'other'}: submit from the repository's folder" in stderr


def test_what_the_nodes_of_a_job_are_told(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPO)
    more = ("--config.train.steps=3000", "--config.log.every_steps=2")
    code, _, _ = job.run(0, 0, arguments=more, SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    assert code == 0
    # Of the options to srun: without the first, the nodes would have no PATH; the last would end a save.
    assert {"--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=0"} < set(job.words("srun-options"))
    folder = str(job.folder)
    for i in range(2):
        environ = dict(item.split("=", 1) for item in (job.folder / f"environment-{i}").read_text().split("\0") if item)
        own = {name for name in environ if not name.startswith("SLURM_")} - {"PWD", "OLDPWD", "SHLVL", "_"}
        assert own == {"PATH", "HOME", "LANG", "JAXTRAIN_CUDA"}
        assert Path(environ["HOME"]).is_dir()
        cluster, problems = detect({}, environ)
        assert cluster and not problems
        assert (cluster.process_id, cluster.num_processes, cluster.local_device_ids) == (i, 2, None)
        loaded = parsed(job.words(f"arguments-{i}"), 16, environ, tmp_path)
        run = loaded.run
        assert (run.train.steps, run.log.every_steps, run.train.max_minutes) == (3000, 2, "auto")
        assert run.train.global_batch == 256 == 16 * run.train.grad_accum  # the config was told of 16 GPUs
        # Three places: shared data, shared checkpoints, and the node's own disk.
        assert loaded.options["workdir"] == f"{folder}/runs/llama3_8b"
        assert run.paths.data == f"{folder}/data" and run.data.source.startswith(run.paths.data)
        assert run.paths.cache == "/tmp/ada/jaxtrain/compile"
