"""deploy/: the image, the JobSet, the MPIJob, the SkyPilot task and the Slurm script, checked by linters and schemas and run.

There is no Docker, Kubernetes, MPI, SkyPilot or Slurm here: fakes behave as their manuals describe. run.sh prints the packages
that it would install in the image. jaxtrain's own command line parses the arguments of pods and tasks.
"""

import contextlib
import copy
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from run_sh import HUNG_S, script, wait_for

from jaxtrain.commands.command import read_line
from jaxtrain.config.command_line import Args
from jaxtrain.config.hardware import Devices
from jaxtrain.main import parser
from jaxtrain.runtime.distributed import detect
from jaxtrain.step.validate import validate

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
BIN = REPO / ".venv" / "bin"
DOCKERFILE, SBATCH = ((DEPLOY / name).read_text() for name in ("Dockerfile", "slurm.sbatch"))
JOBSET, MPIJOB, SKYPILOT = (yaml.safe_load((DEPLOY / f"{name}.yaml").read_text()) for name in ("jobset", "mpijob", "skypilot"))

# 0 done, 2 wrong command or config, 3 preflight found a fault, 75 start again, 76 diverged, 124 hang, 130 Ctrl-C, 1 anything
# else. The last three are the shell's codes: out of memory, an abort, a crash in native code.
AGAIN, FOR_GOOD = (75, 124), (1, 2, 3, 76, 130, 134, 137, 139)


def tool(name: str) -> str:
    found = BIN / name
    return str(found) if found.exists() else shutil.which(name) or pytest.fail(f"{name} is not installed: ./run.sh test")


def parsed(arguments: list[str], gpus: int, environ: dict[str, str], tmp_path: Path) -> Args:
    """Parse a training command line in the environment `environ` alone, and check that it has no problems and takes a batch of
    256. Problems about data and volumes, which this machine lacks, are ignored.
    """
    machine = Devices("gpu", "NVIDIA H200", gpus, 140.0, "described", 90)
    with mock.patch.dict(os.environ, environ, clear=True), contextlib.chdir(REPO):
        args = read_line(parser(), arguments)
        problems = [*args.problems, *validate(args.loaded.run, machine, tmp_path / "run")]
    assert not [str(p) for p in problems if not re.search("no such file|is not writable", p.rule)]
    run = args.loaded.run
    assert run.train.global_batch == 256 == gpus * run.train.grad_accum
    return args


def process_of(environ: dict[str, str]) -> tuple[int, int, str]:
    """Return (process id, number of processes, coordinator) that jaxtrain reads from an environment."""
    cluster, problems = detect({}, environ)
    assert cluster and not problems and cluster.local_device_ids in (None, (0,))
    return cluster.process_id, cluster.num_processes, cluster.coordinator


def environment_of(file: Path) -> dict[str, str]:
    return dict(item.split("=", 1) for item in file.read_text().split("\0") if item)


def mounts_of(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (container,) = pod["containers"]
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


# --- The image --------------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each line of a Dockerfile, without comments and with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]


def copied(text: str) -> list[str]:
    """Return the source paths of the COPY lines, in order."""
    return [word for name, rest in instructions(text) if name == "COPY" for word in shlex.split(rest)[:-1]]


def findings_of(text: str, *command: str) -> str:
    return subprocess.run([tool(command[0]), *command[1:], "-"], input=text, capture_output=True, text=True).stdout


def test_the_linters_find_nothing():
    hadolint = ("hadolint", "--no-color", "--failure-threshold=style")
    assert findings_of(DOCKERFILE, *hadolint) == ""
    assert "DL3002" in findings_of(DOCKERFILE.replace("USER 1000", "USER root"), *hadolint)
    shellcheck = ("shellcheck", "--shell=bash")
    scripts = [SBATCH, SKYPILOT["setup"], SKYPILOT["run"]]
    scripts += [mpi_pod(role)["containers"][0]["args"][0] for role in ("Launcher", "Worker")]
    assert "SC2086" in findings_of("ls $1\n", *shellcheck) and [findings_of(text, *shellcheck) for text in scripts] == [""] * 5


def test_the_image_copies_what_exists_and_is_sent():
    rules = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    sources = [source.rstrip("/") for source in copied(DOCKERFILE)]
    assert sources and not [s for s in sources if not (REPO / s).exists()]
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(sources)
    assert any(fnmatch.fnmatch("jaxtrain/x/__pycache__", rule) for rule in rules[1:] if rule[0] != "!")


def test_packages_are_installed_before_the_code_is_copied(tmp_path: Path):
    """`run.sh setup` comes before the code's COPY, and needs only files copied before. So a change of the code does not rebuild
    the packages' layer of gigabytes.
    """
    steps = instructions(DOCKERFILE)
    setup = next(i for i, (name, rest) in enumerate(steps) if name == "RUN" and "run.sh setup" in rest)
    before = "\n".join(f"{name} {rest}" for name, rest in steps[:setup])
    sources = copied(before)
    assert "jaxtrain/" not in sources and "jaxtrain/" in copied(DOCKERFILE)
    for source in sources:
        where = tmp_path / source
        (shutil.copytree if source.endswith("/") else shutil.copy)(REPO / source, where)
    (cuda,) = [rest.partition("=")[2] for name, rest in steps if name == "ARG" and rest.startswith("JAXTRAIN_CUDA")]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAXTRAIN_CUDA": cuda, "JAXTRAIN_DRY_RUN": "1"}
    done = subprocess.run(["bash", "run.sh", "setup"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and f"requirements/cuda{cuda}.txt" in done.stderr, done.stderr


def test_the_image_has_the_python_that_run_sh_wants_and_starts_it_without_a_shell():
    steps = dict(instructions(DOCKERFILE))  # the last instruction of each name
    wanted = (REPO / ".python-version").read_text().strip()
    assert re.fullmatch(rf"python:{re.escape(wanted)}\.\d+-slim-\w+", steps["FROM"])
    assert json.loads(steps["ENTRYPOINT"]) == [f"{steps['WORKDIR']}/run.sh"] and steps["STOPSIGNAL"] == "SIGTERM"


# --- Kubernetes -------------------------------------------------------------------------------------------------------------

(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]


def mpi_pod(role: str) -> dict[str, Any]:
    return MPIJOB["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]


def test_pods_fit_the_schemas_of_kubernetes():
    latest = kubernetes_validate.latest_version()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": copy.deepcopy(JOB)}
    for version in ("1.31", latest):  # the first version in which podFailurePolicy is stable
        kubernetes_validate.validate(job, version, strict=True)
    for role in ("Launcher", "Worker"):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": mpi_pod(role)}
        kubernetes_validate.validate(pod, latest, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, latest, strict=True)


def ending(code: int, disrupted: bool = False) -> str:
    """Return the JobSet's reaction to a container that exits with `code`: done, again or failed.

    A Job applies the first matching rule of its podFailurePolicy. FailJob ends the Job with the reason PodFailurePolicy. Count,
    or no matching rule, counts against backoffLimit. The JobSet applies the first rule for that reason, and restarts if none
    matches. disrupted: the pod has the condition DisruptionTarget.
    """
    if code == 0:
        return "done"
    reason = "BackoffLimitExceeded"
    assert JOB["backoffLimit"] == 0
    for rule in JOB["podFailurePolicy"]["rules"]:
        conditions = [c["type"] for c in rule.get("onPodConditions", []) if c["status"] == "True"]
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        if (disrupted and "DisruptionTarget" in conditions) or ((code in codes["values"]) == (codes["operator"] == "In")):
            reason = "PodFailurePolicy" if rule["action"] == "FailJob" else reason
            break
    for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return {"FailJobSet": "failed", "RestartJobSet": "again"}[rule["action"]]
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
    return "again"


def test_every_exit_code_has_its_consequence():
    expected = {0: "done"} | dict.fromkeys(AGAIN, "again") | dict.fromkeys(FOR_GOOD, "failed")
    assert {code: ending(code) for code in expected} == expected
    # After an eviction or a drain the JobSet restarts, even if the save took too long and the pod was killed.
    assert [ending(code, disrupted=True) for code in (75, 137, 143)] == ["again"] * 3
    names = {rule.get("onExitCodes", {}).get("containerName") for rule in JOB["podFailurePolicy"]["rules"]}
    assert names - {None} == {c["name"] for c in POD["containers"]}
    assert POD["restartPolicy"] == "Never"  # a podFailurePolicy requires this


def test_pods_find_each_other_and_run_what_jaxtrain_understands(tmp_path: Path):
    """The coordinator is the host name that the JobSet controller gives pod 0."""
    (container,), network, nodes = POD["containers"], JOBSET["spec"]["network"], JOB["completions"]
    assert nodes == JOB["parallelism"] and JOB["completionMode"] == "Indexed" and network["enableDNSHostnames"]
    pod_zero = f"{JOBSET['metadata']['name']}-{REPLICATED['name']}-0-0.{network['subdomain']}"
    (port,) = [p["containerPort"] for p in container["ports"]]
    told = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    fields = {v["name"]: v["valueFrom"]["fieldRef"]["fieldPath"] for v in container["env"] if "value" not in v}
    for index in range(nodes):
        pod = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
        environ = told | {name: pod[field] for name, field in fields.items()} | {"JOB_COMPLETION_INDEX": str(index)}
        assert process_of(environ) == (index, nodes, f"{pod_zero}:{port}")
    image = dict(rest.split("=", 1) for name, rest in instructions(DOCKERFILE) if name == "ENV")
    args = parsed(container["args"], nodes * container["resources"]["limits"]["nvidia.com/gpu"], image | told, tmp_path)
    # Every place of state is on its own volume, and every place that is written is on a writable volume.
    mounts = mounts_of(POD)
    run = args.loaded.run
    places = {run.data.source: "/data", args.workdir: "/runs", run.paths.cache: "/scratch"}
    assert [place for place, mount in places.items() if not place.startswith(f"{mount}/")] == []
    assert [path for path, mount in mounts.items() if mount.get("readOnly")] == ["/data"]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(volumes) == {mount["name"] for mount in mounts.values()}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]["name"]]
    # The user is the image's, and there is time for a save.
    assert POD["securityContext"]["runAsUser"] == int(dict(instructions(DOCKERFILE))["USER"])
    assert POD["terminationGracePeriodSeconds"] >= 300


# --- Kubeflow's MPI operator and SkyPilot -------------------------------------------------------------------------------------

# Write its arguments and its environment to files.
NOTES = """#!/bin/bash
for argument; do echo "$argument"; done >arguments
env -0 >environment
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_nodes_of_a_skypilot_task(rank: int, tmp_path: Path):
    """Each node runs the same script, which takes its rank, the number of nodes and the coordinator from SkyPilot."""
    script(tmp_path / "run.sh", NOTES)
    nodes, gpus = SKYPILOT["num_nodes"], int(SKYPILOT["resources"]["accelerators"].rpartition(":")[2])
    told = {"NODE_RANK": str(rank), "NUM_NODES": str(nodes), "NUM_GPUS_PER_NODE": str(gpus), "NODE_IPS": "10.0.0.7\n10.0.0.8"}
    environ = SKYPILOT["envs"] | {f"SKYPILOT_{name}": value for name, value in told.items()} | {"PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", SKYPILOT["run"]], cwd=tmp_path, env=environ, check=True)
    given = environment_of(tmp_path / "environment")
    assert process_of(given) == (rank, nodes, "10.0.0.7:12321")
    args = parsed((tmp_path / "arguments").read_text().splitlines(), nodes * gpus, given, tmp_path)
    places = (args.loaded.run.data.source, args.workdir)
    assert [place.rpartition("/")[0] for place in places] == list(SKYPILOT["volumes"])
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert (tuple(recovery["recover_on_exit_codes"]), recovery["max_restarts_on_errors"]) == (AGAIN, 0)


# Run the program once, with the variables of rank 1 and those of -x. Exit with the next code of the file `codes`.
MPIRUN = """#!/bin/bash
given=()
while [[ $1 == -* ]]; do
  case $1 in
    --mca) shift 3 ;;
    -x) given+=("$2") && shift 2 ;;
    --bind-to | --hostfile | --map-by) shift 2 ;;
    *) exit 99 ;;
  esac
done
[[ $1 != true ]] || exit 0
shift
for argument; do echo "$argument"; done >"$HOME/arguments"
for word in "${given[@]}"; do [[ $word == *=* ]] && echo "$word"; done >"$HOME/given"
read -r code <"$HOME/codes"
sed -i 1d "$HOME/codes"
exit "$code"
"""


@pytest.mark.parametrize("codes", [(1,), (137,), (75, 124, 0), (75, 76), (75,) * 21])
def test_the_launcher_of_an_mpijob(codes: tuple[int, ...], tmp_path: Path):
    """The launcher starts all processes again after the exit codes 75 and 124, at most twenty times."""
    script(tmp_path / "mpirun", MPIRUN)
    hosts = [f"llama3-8b-worker-{i}.llama3-8b.default.svc slots=1\n" for i in range(2)]
    (tmp_path / "hostfile").write_text("".join(hosts))
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in (*codes, 99)))
    (container,) = mpi_pod("Launcher")["containers"]
    command = [*container["command"], container["args"][0].replace("/etc/mpi/hostfile", str(tmp_path / "hostfile"))]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == codes[-1] and (tmp_path / "codes").read_text() == "99\n", done.stderr
    (given,) = (tmp_path / "given").read_text().splitlines()
    name, _, coordinator = given.partition("=")
    rank = {f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1"))}
    assert process_of(rank | {name: coordinator}) == (1, 2, f"{hosts[0].split()[0]}:12321")
    (worker,) = mpi_pod("Worker")["containers"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"] * MPIJOB["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    parsed((tmp_path / "arguments").read_text().splitlines(), gpus, rank | {name: coordinator}, tmp_path)
    assert set(mounts_of(mpi_pod("Worker"))) == {"/data", "/runs", "/scratch", "/dev/shm"}


# --- Slurm ------------------------------------------------------------------------------------------------------------------


def test_sbatch_reads_every_option():
    """sbatch stops reading at the first command."""
    head = next(i for i, line in enumerate(SBATCH.splitlines()) if line.strip() and line[0] != "#")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", "\n".join(SBATCH.splitlines()[:head]), re.MULTILINE))
    assert len(options) == len(re.findall(r"#\s*SBATCH", SBATCH)) == 13
    assert options["export"] == "NIL" and options["open-mode"] == "append" and not options["requeue"]
    warning = re.fullmatch(r"(USR1|TERM)@(\d+)", options["signal"])  # without "B:", so every run.sh saves
    # run.sh does not restart within the last ten minutes of a job, so the signal must come within them.
    assert warning and 120 <= int(warning[2]) <= 600


# Run the command once a node, as srun does, and exit with the highest exit code. Log srun's options to a file.
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
# A fake run. Its plan file holds an exit code, or `wait`: wait for SIGUSR1, then exit with 75.
RUN = """#!/bin/bash
echo $$ >"task-$SLURM_PROCID"
for argument; do echo "$argument"; done >"arguments-$SLURM_PROCID"
env -0 >"environment-$SLURM_PROCID"
read -r plan <"plan-$SLURM_PROCID"
if [[ $plan == wait ]]; then
  trap 'exit 75' USR1
  touch "listens-$SLURM_PROCID"
  for _ in {1..2400}; do sleep 0.05; done
fi
exit "$plan"
"""


class Job:
    """The batch script, with Slurm's variables alone. `plans`: for each node, the exit code of a fake run, or `wait`."""

    def __init__(self, folder: Path):
        self.folder = folder / "a folder"
        self.bin = folder / "bin"
        for path, text in (
            (self.bin / "srun", SRUN),
            (self.bin / "scontrol", '#!/bin/bash\necho "$@" >>"$SLURM_SUBMIT_DIR/requeued"\nexit "${FAKE_SCONTROL:-0}"\n'),
            (self.folder / "run.sh", RUN),
        ):
            script(path, text)

    def begin(self, *plans: str | int, arguments: tuple[str, ...] = (), **env: str) -> subprocess.Popen[bytes]:
        for i, plan in enumerate(plans):
            (self.folder / f"plan-{i}").write_text(f"{plan}\n")
        slurm = {"JOB_ID": "4711", "JOB_NAME": "llama3_8b", "JOB_NUM_NODES": str(len(plans)), "JOB_USER": "ada"}
        base = {f"SLURM_{key}": value for key, value in slurm.items()}
        base |= {"SLURM_SUBMIT_DIR": str(self.folder), "PATH": f"{self.bin}:/usr/bin:/bin"}
        command = ["bash", str(DEPLOY / "slurm.sbatch"), *arguments]
        return subprocess.Popen(command, env=base | env, cwd="/", stdin=subprocess.DEVNULL)

    def run(self, *plans: str | int, arguments: tuple[str, ...] = (), **env: str) -> tuple[int, list[str]]:
        """Run the script. Returns (exit code, arguments of each call of scontrol)."""
        code = self.begin(*plans, arguments=arguments, **env).wait(timeout=HUNG_S)
        return code, self.words("requeued") if (self.folder / "requeued").exists() else []

    def words(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "queued"),
    [
        ((0, 0), "", 0, False),
        ((0, 1), "", 1, False),
        ((75, 124), "", 124, True),
        ((75, 76), "", 76, False),  # a single diverged node ends the job
        ((75,), "19", 75, True),
        ((75,), "20", 75, False),
    ],
)
def test_a_job_is_queued_again_where_it_asks_for_it(job: Job, codes: tuple[int, ...], restarts: str, code: int, queued: bool):
    env = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    assert job.run(*codes, **env) == (code, ["requeue Incomplete 4711"] if queued else [])


def test_a_requeue_that_slurm_refuses_and_another_folder_fail_the_job(job: Job, tmp_path: Path):
    assert job.run(75, FAKE_SCONTROL="1")[0] != 0
    (tmp_path / "other").mkdir()
    assert job.run(0, SLURM_SUBMIT_DIR=str(tmp_path / "other"))[0] == 2


def test_the_signal_before_the_time_limit(job: Job):
    """Slurm sends SIGUSR1 to the step's tasks, not to the batch script. The script then requeues the job, and exits with 75."""
    process = job.begin("wait", "wait")
    for i in range(2):
        wait_for(lambda i=i: (job.folder / f"listens-{i}").exists())
        os.kill(int(*job.words(f"task-{i}")), signal.SIGUSR1)
    assert process.wait(timeout=HUNG_S) == 75
    assert job.words("requeued") == ["requeue Incomplete 4711"]


def test_what_the_nodes_of_a_job_are_told(job: Job, tmp_path: Path):
    more = ("--config.train.steps=3000", "--config.log.every_steps=2")
    assert job.run(0, 0, arguments=more, SLURM_JOB_END_TIME="4102444800")[0] == 0
    # Options of srun: without the first, nodes would have no PATH. Without the last, one exit would interrupt a save.
    assert {"--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=0"} < set(job.words("srun-options"))
    for i in range(2):
        environ = environment_of(job.folder / f"environment-{i}")
        own = {name for name in environ if not name.startswith("SLURM_")} - {"PWD", "OLDPWD", "SHLVL", "_"}
        assert own == {"PATH", "HOME", "LANG", "JAXTRAIN_CUDA"} and Path(environ["HOME"]).is_dir()
        assert process_of(environ)[:2] == (i, 2)
        args = parsed(job.words(f"arguments-{i}"), 16, environ, tmp_path)
        run, folder = args.loaded.run, str(job.folder)
        assert (run.train.steps, run.log.every_steps, run.train.max_minutes) == (3000, 2, "auto")
        # Three places: shared data, shared checkpoints, and the node's own disk.
        assert args.workdir == f"{folder}/runs/llama3_8b"
        assert run.paths.data == f"{folder}/data" and run.data.source.startswith(run.paths.data)
        assert run.paths.cache == "/tmp/ada/jaxtrain/compile"
