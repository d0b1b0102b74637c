"""deploy/: the image, the JobSet, the MPIJob, the SkyPilot task and the Slurm script, checked by linters and schemas and run.

There is no Docker, Kubernetes, MPI, SkyPilot or Slurm here: fakes behave as their manuals describe. run.sh prints the packages
that it would install in the image. jaxtrain's own command line parses the arguments of pods and tasks.
"""

import copy
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import pytest
import yaml
from run_sh import HUNG_S, script, wait_for

from jaxtrain import launch
from jaxtrain.distributed import detect
from jaxtrain.hardware import Devices
from jaxtrain.main import COMMAND
from jaxtrain.validate import validate

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
BIN = REPO / ".venv" / "bin"

# 0 done, 2 wrong command or config, 3 preflight found a fault, 75 start again, 76 diverged, 124 hang, 130 Ctrl-C, 1 anything
# else. The last three are the shell's codes: out of memory, an abort, a crash in native code.
AGAIN, FOR_GOOD = (75, 124), (1, 2, 3, 76, 130, 134, 137, 139)


def tool(name: str) -> str:
    found = BIN / name
    return str(found) if found.exists() else shutil.which(name) or pytest.fail(f"{name} is not installed: ./run.sh test")


def parsed(arguments: list[str], gpus: int, environ: dict[str, str], tmp_path: Path) -> launch.Loaded:
    """Parse a training command line in the environment `environ` alone, and check that it has no problems. Problems about data
    and volumes, which this machine lacks, are ignored.
    """
    machine = Devices("gpu", "NVIDIA H200", gpus, 140.0, "described", 90)
    with mock.patch.dict(os.environ, environ, clear=True):
        loaded = COMMAND.parse(arguments).config
        problems = [*loaded.problems, *validate(loaded.run, machine, tmp_path / "run")]
    assert not [str(p) for p in problems if not re.search("no such file|is not writable", p.rule)]
    return loaded


# --- The image --------------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each line of a Dockerfile, without comments and with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]


DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def copied(text: str) -> list[str]:
    """Return the source paths of the COPY lines, in order."""
    return [word for name, rest in instructions(text) if name == "COPY" for word in shlex.split(rest)[:-1]]


def test_the_linters_find_nothing():
    def lint(text: str) -> list[str]:
        command = [tool("hadolint"), "--no-color", "--format=json", "--failure-threshold=style", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        found = [finding["code"] for finding in json.loads(done.stdout)]
        assert bool(found) == (done.returncode != 0), done.stderr
        return found

    done = subprocess.run([tool("shellcheck"), str(DEPLOY / "slurm.sbatch")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert lint(DOCKERFILE) == []
    assert "DL3002" in lint(DOCKERFILE.replace("USER 1000", "USER root"))  # the path at which the linter looks
    assert "DL3006" in lint(re.sub(r"(FROM python):\S+", r"\1", DOCKERFILE))


def test_the_image_copies_what_exists_and_is_sent():
    rules = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    sent = [rule[1:] for rule in rules if rule.startswith("!")]
    sources = [source.rstrip("/") for source in copied(DOCKERFILE)]
    assert sources and not [s for s in sources if not (REPO / s).exists()]
    assert sorted(sent) == sorted(sources)
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
    done = subprocess.run(
        ["bash", "run.sh", "setup"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAXTRAIN_CUDA": cuda, "JAXTRAIN_DRY_RUN": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"would install from requirements/cuda{cuda}.txt" in done.stderr


def test_the_image_has_the_python_that_run_sh_wants_and_passes_signals_on():
    (base,) = [rest for name, rest in instructions(DOCKERFILE) if name == "FROM"]
    wanted = (REPO / ".python-version").read_text().strip()
    assert re.fullmatch(rf"python:{re.escape(wanted)}\.\d+-slim-\w+", base)
    steps = dict(instructions(DOCKERFILE))  # the last instruction of each name
    assert json.loads(steps["ENTRYPOINT"]) == [f"{steps['WORKDIR']}/run.sh"]  # the array form: no shell in between
    assert steps["STOPSIGNAL"] == "SIGTERM"
    assert steps["USER"] == "1000"
    environment = {rest.partition("=")[0]: rest.partition("=")[2] for name, rest in instructions(DOCKERFILE) if name == "ENV"}
    assert environment["JAXTRAIN_IMAGE"] == "${JAXTRAIN_IMAGE}" and environment["JAXTRAIN_CUDA"] == "${JAXTRAIN_CUDA}"
    assert "utility" in environment["NVIDIA_DRIVER_CAPABILITIES"]  # nvidia-smi, for preflight


# --- Kubernetes -------------------------------------------------------------------------------------------------------------

# Fields of a JobSet, from its API: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go, at v0.12.0. The reasons and the
# form of a rule's name are from its webhook (pkg/webhooks/jobset_webhook.go). `template.spec` is a Job's spec, checked
# separately.
TEXT, NUMBER, FLAG, TEXTS = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, {"type": "array"}
NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}


def fields(*required: str, **known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts"]
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
RULE = fields(
    *("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ACTIONS},
    onJobFailureReasons={"type": "array", "uniqueItems": True, "items": {"enum": REASONS}},
    onJobFailureMessagePatterns=TEXTS,
    targetReplicatedJobs=TEXTS,
)
TEMPLATE = fields("spec", metadata={}, spec={})
REPLICATED = fields(*("name", "template"), name=NAME, groupName=TEXT, replicas=NUMBER, dependsOn=TEXTS, template=TEMPLATE)
JOBSET = fields(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=fields("name", name=NAME, namespace=NAME, labels={"type": "object"}, annotations={"type": "object"}),
    spec=fields(
        "replicatedJobs",
        replicatedJobs={"type": "array", "minItems": 1, "items": REPLICATED},
        network=fields(enableDNSHostnames=FLAG, subdomain=NAME, publishNotReadyAddresses=FLAG),
        failurePolicy=fields(
            maxRestarts=NUMBER,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={"type": "array", "items": RULE},
        ),
        successPolicy=fields("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TEXTS),
        suspend=FLAG,
        coordinator=fields("replicatedJob", replicatedJob=TEXT, jobIndex=NUMBER, podIndex=NUMBER),
        managedBy=TEXT,
        ttlSecondsAfterFinished=NUMBER,
    ),
)


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "jobset.yaml").read_text())


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    return job_of(jobset)["template"]["spec"]


def check_kubernetes(jobset: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(JOBSET).validate(jobset)
    name = jobset["metadata"]["name"]
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job_of(jobset)}
    for version in ("1.31", kubernetes_validate.latest_version()):  # the first version in which podFailurePolicy is stable
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda j: j["spec"]["network"].update(enableDNSHostname=True),
        lambda j: j["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
        lambda j: j["spec"]["failurePolicy"]["rules"][0].update(name="ended-for-good"),
        lambda j: j["spec"]["replicatedJobs"][0].update(replica=2),
        lambda j: job_of(j).update(paralelism=2),
        lambda j: pod_of(j)["containers"][0].update(env=[{"name": "A", "value": 2}]),
        lambda j: pod_of(j).update(terminationGracePeriodSeconds="10m"),
    ],
)
def test_the_jobset_fits_its_schema_and_one_mistake_does_not(jobset: dict[str, Any], spoil: Callable[[dict[str, Any]], None]):
    check_kubernetes(jobset)
    spoilt = copy.deepcopy(jobset)
    spoil(spoilt)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_kubernetes(spoilt)


def ending(jobset: dict[str, Any], code: int, disrupted: bool = False) -> str:
    """Return the JobSet's reaction to a container that exits with `code`: done, again or failed.

    A Job applies the first matching rule of its podFailurePolicy. FailJob ends the Job with the reason PodFailurePolicy. Count,
    or no matching rule, counts against backoffLimit. The JobSet applies the first rule for that reason, and restarts if none
    matches. disrupted: the pod has the condition DisruptionTarget.
    """
    if code == 0:
        return "done"
    job, reason = job_of(jobset), "BackoffLimitExceeded"
    assert job["backoffLimit"] == 0
    for rule in job["podFailurePolicy"]["rules"]:
        conditions = [c["type"] for c in rule.get("onPodConditions", []) if c["status"] == "True"]
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        if (disrupted and "DisruptionTarget" in conditions) or ((code in codes["values"]) == (codes["operator"] == "In")):
            reason = "PodFailurePolicy" if rule["action"] == "FailJob" else reason
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return {"FailJobSet": "failed", "RestartJobSet": "again"}[rule["action"]]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    return "again"


def test_every_exit_code_has_its_consequence(jobset: dict[str, Any]):
    expected = {0: "done"} | dict.fromkeys(AGAIN, "again") | dict.fromkeys(FOR_GOOD, "failed")
    assert {code: ending(jobset, code) for code in expected} == expected
    # After an eviction or a drain the JobSet restarts, even if the save took too long and the pod was killed.
    assert [ending(jobset, code, disrupted=True) for code in (75, 137, 143)] == ["again"] * 3
    names = {rule.get("onExitCodes", {}).get("containerName") for rule in job_of(jobset)["podFailurePolicy"]["rules"]}
    assert names - {None} == {c["name"] for c in pod_of(jobset)["containers"]}
    assert pod_of(jobset)["restartPolicy"] == "Never"  # a podFailurePolicy requires this


def test_pods_find_each_other(jobset: dict[str, Any]):
    """The coordinator is the host name that the JobSet controller gives pod 0. The number of processes is the Job's number of
    pods.
    """
    (container,), job, network = pod_of(jobset)["containers"], job_of(jobset), jobset["spec"]["network"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    nodes = job["completions"]
    assert nodes == job["parallelism"] and job["completionMode"] == "Indexed" and network["enableDNSHostnames"]
    pod_zero = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
    (port,) = [p["containerPort"] for p in container["ports"]]
    told = {variable["name"]: variable["value"] for variable in container["env"]}
    for index in range(nodes):
        environ = told | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
        cluster, problems = detect({}, environ)
        assert cluster and not problems
        assert (cluster.process_id, cluster.num_processes, cluster.local_device_ids) == (index, nodes, None)
        assert cluster.coordinator == f"{pod_zero}:{port}"


def test_pods_run_what_jaxtrain_understands(jobset: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPO)
    (container,) = pod_of(jobset)["containers"]
    nodes, gpus = job_of(jobset)["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    image = dict(rest.split("=", 1) for name, rest in instructions(DOCKERFILE) if name == "ENV")
    loaded = parsed(container["args"], nodes * gpus, image | environ, tmp_path)
    assert loaded.run.train.global_batch == 256 == nodes * gpus * loaded.run.train.grad_accum
    # Every place of state is on its own volume, and every place that is written is on a writable volume.
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    places = {loaded.run.data.source: "/data", loaded.options["workdir"]: "/runs", loaded.run.paths.cache: "/scratch"}
    assert [place for place, mount in places.items() if not place.startswith(f"{mount}/")] == []
    assert [path for path, mount in mounts.items() if mount.get("readOnly")] == ["/data"]
    volumes = {volume["name"]: volume for volume in pod_of(jobset)["volumes"]}
    assert set(volumes) == {mount["name"] for mount in mounts.values()}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]["name"]]
    # The user is the image's, and there is time for a save.
    assert pod_of(jobset)["securityContext"]["runAsUser"] == int(dict(instructions(DOCKERFILE))["USER"])
    assert pod_of(jobset)["terminationGracePeriodSeconds"] >= 300


# --- Kubeflow's MPI operator and SkyPilot -------------------------------------------------------------------------------------

# The fields of an MPIJob, from its API: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go, at v0.6.0.
REPLICA = fields(
    *("replicas", "template"),
    replicas=NUMBER,
    restartPolicy={"enum": ["Never", "OnFailure", "Always", "ExitCode"]},
    template=fields("spec", metadata={}, spec={}),
)
MPIJOB = fields(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=fields("name", name=NAME, namespace=NAME, labels={"type": "object"}, annotations={"type": "object"}),
    spec=fields(
        "mpiReplicaSpecs",
        slotsPerWorker=NUMBER,
        runLauncherAsWorker=FLAG,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        sshAuthMountPath=TEXT,
        runPolicy=fields(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            ttlSecondsAfterFinished=NUMBER,
            activeDeadlineSeconds=NUMBER,
            backoffLimit=NUMBER,
            suspend=FLAG,
            schedulingPolicy={"type": "object"},
        ),
        mpiReplicaSpecs=fields(*("Launcher", "Worker"), Launcher=REPLICA, Worker=REPLICA),
    ),
)
# Fields of a SkyPilot task that this file uses, from skypilot-org/skypilot, sky/utils/schemas.py, at v0.10.3.
EXIT_CODES = {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0, "maximum": 255}}
RECOVERY = fields(strategy=TEXT, max_restarts_on_errors=NUMBER, recover_on_exit_codes=EXIT_CODES)
RESOURCES = fields(infra=TEXT, accelerators=TEXT, network_tier=TEXT, use_spot=FLAG, image_id=TEXT, job_recovery=RECOVERY)
MAPPING = {"type": "object", "additionalProperties": TEXT}
SKYPILOT = fields(
    "run", name=TEXT, num_nodes=NUMBER, workdir=TEXT, resources=RESOURCES, volumes=MAPPING, envs=MAPPING, setup=TEXT, run=TEXT
)


@pytest.fixture
def mpijob() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())


@pytest.fixture
def skypilot() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())


def mpi_pod(mpijob: dict[str, Any], role: str) -> dict[str, Any]:
    return mpijob["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]


def check_mpijob(mpijob: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(MPIJOB).validate(mpijob)
    for role in ("Launcher", "Worker"):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, "spec": mpi_pod(mpijob, role)}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m["spec"].update(slotPerWorker=1),
        lambda m: m["spec"]["mpiReplicaSpecs"].pop("Worker"),
        lambda m: m["spec"]["runPolicy"].update(cleanPodPolicy="running"),
        lambda m: mpi_pod(m, "Worker")["containers"][0].update(volumeMount=[]),
        lambda m: mpi_pod(m, "Launcher")["containers"][0]["env"][0].update(value=1),
    ],
)
def test_the_mpijob_fits_its_schema_and_one_mistake_does_not(mpijob: dict[str, Any], spoil: Callable[[dict[str, Any]], None]):
    check_mpijob(mpijob)
    spoil(mpijob)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_mpijob(mpijob)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t["resources"].update(accelerator="H200:8"),
        lambda t: t["resources"]["job_recovery"].update(recover_on_exit_codes=[75, 256]),
        lambda t: t.update(num_nodes="2"),
    ],
)
def test_the_skypilot_task_fits_its_schema_and_one_mistake_does_not(
    skypilot: dict[str, Any], spoil: Callable[[dict[str, Any]], None]
):
    check = jsonschema.Draft202012Validator(SKYPILOT).validate
    check(skypilot)
    spoil(skypilot)
    with pytest.raises(jsonschema.ValidationError):
        check(skypilot)


def shellcheck(text: str) -> str:
    done = subprocess.run([tool("shellcheck"), "--shell=bash", "-"], input=text, capture_output=True, text=True)
    return done.stdout


def test_the_scripts_in_these_files_are_sound(mpijob: dict[str, Any], skypilot: dict[str, Any]):
    scripts = [skypilot["setup"], skypilot["run"]]
    scripts += [mpi_pod(mpijob, role)["containers"][0]["args"][0] for role in ("Launcher", "Worker")]
    assert [shellcheck(text) for text in scripts] == [""] * 4
    assert "SC2086" in shellcheck("set -- $HOME\nls $1\n")  # the path at which the linter looks


# Write its arguments and its environment to files.
NOTES = """#!/bin/bash
for argument; do echo "$argument"; done >arguments
env -0 >environment
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_nodes_of_a_skypilot_task(skypilot: dict[str, Any], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each node runs the same script. SkyPilot's variables give its rank, the number of nodes and the coordinator."""
    script(tmp_path / "run.sh", NOTES)
    nodes, gpus = skypilot["num_nodes"], int(skypilot["resources"]["accelerators"].rpartition(":")[2])
    told = {"NODE_RANK": str(rank), "NUM_NODES": str(nodes), "NUM_GPUS_PER_NODE": str(gpus), "NODE_IPS": "10.0.0.7\n10.0.0.8"}
    environ = skypilot["envs"] | {f"SKYPILOT_{name}": value for name, value in told.items()} | {"PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", skypilot["run"]], cwd=tmp_path, env=environ, check=True)
    given = dict(item.split("=", 1) for item in (tmp_path / "environment").read_text().split("\0") if item)
    cluster, problems = detect({}, given)
    assert cluster and not problems
    assert (cluster.process_id, cluster.num_processes, cluster.coordinator) == (rank, nodes, "10.0.0.7:12321")
    monkeypatch.chdir(REPO)
    loaded = parsed((tmp_path / "arguments").read_text().splitlines(), nodes * gpus, given, tmp_path)
    assert loaded.run.train.global_batch == 256 == nodes * gpus * loaded.run.train.grad_accum
    places = (loaded.run.data.source, loaded.options["workdir"])
    assert [place.rpartition("/")[0] for place in places] == list(skypilot["volumes"])


def test_skypilot_starts_again_after_the_codes_that_ask_for_it(skypilot: dict[str, Any]):
    recovery = skypilot["resources"]["job_recovery"]
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


@pytest.mark.parametrize("codes", [(0,), *((code,) for code in FOR_GOOD), (75, 124, 0), (75, 76), (75,) * 21])
def test_the_launcher_of_an_mpijob(mpijob: dict[str, Any], codes: tuple[int, ...], tmp_path: Path, monkeypatch: Any):
    """The launcher starts all processes again after the exit codes 75 and 124, at most twenty times."""
    script(tmp_path / "mpirun", MPIRUN)
    hosts = [f"llama3-8b-worker-{i}.llama3-8b.default.svc slots=1\n" for i in range(2)]
    (tmp_path / "hostfile").write_text("".join(hosts))
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in (*codes, 99)))
    (container,) = mpi_pod(mpijob, "Launcher")["containers"]
    command = [*container["command"], container["args"][0].replace("/etc/mpi/hostfile", str(tmp_path / "hostfile"))]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == codes[-1] and (tmp_path / "codes").read_text() == "99\n", done.stderr
    monkeypatch.chdir(REPO)
    (given,) = (tmp_path / "given").read_text().splitlines()
    name, _, coordinator = given.partition("=")
    assert (name, coordinator) == ("JAXTRAIN_COORDINATOR", f"{hosts[0].split()[0]}:12321")
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    rank |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", name: coordinator}
    cluster, problems = detect({}, rank)
    assert cluster and not problems and (cluster.process_id, cluster.num_processes) == (1, 2)
    (worker,) = mpi_pod(mpijob, "Worker")["containers"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"] * mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    loaded = parsed((tmp_path / "arguments").read_text().splitlines(), gpus, rank, tmp_path)
    assert loaded.run.train.global_batch == 256 == gpus * loaded.run.train.grad_accum
    assert {mount["mountPath"] for mount in worker["volumeMounts"]} == {"/data", "/runs", "/scratch", "/dev/shm"}


# --- Slurm ------------------------------------------------------------------------------------------------------------------

# The script's long options of sbatch and the form of their values, '' if they have none: Slurm 26.11, src/common/slurm_opt.c
# and doc/man/man1/sbatch.1. Slurm 23.02 has them all, and was the first with `--export=NIL`.
FORMS = {
    "exclusive": "(user|mcs|topo)?",
    "export": r"ALL|NIL|NONE|(ALL,)?\w+(=[^,]*)?(,\w+(=[^,]*)?)*",
    "gpus-per-node": r"(\w+:)?\d+",
    "job-name": r"[\w.-]+",
    "mem": r"\d+[KMGT]?",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"([\w./-]|%[AaJjNnstuxrb%])+",
    "propagate": r"(ALL|NONE|[A-Z]+(,[A-Z]+)*)?",
    "requeue": "(expedite)?",
    "signal": r"([RB]+:)?(?P<signal>[A-Z]+[12]?|\d+)(@(?P<seconds>\d+))?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}


def directives(text: str) -> tuple[dict[str, str], list[str]]:
    """Return {option: value} of the #SBATCH lines, and the lines that sbatch would refuse or ignore."""
    found, wrong = {}, []
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    for i, line in enumerate(lines):
        if not re.match(r"\s*#\s*SBATCH\b", line):
            continue
        option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        name, value = (option[1], option[2] or "") if option else ("", "")
        # sbatch stops reading at the first command.
        if name not in FORMS or name in found or i > first_command or not re.fullmatch(FORMS[name], value):
            wrong.append(line)
        found[name] = value
    return found, wrong


SBATCH = (DEPLOY / "slurm.sbatch").read_text()


def test_sbatch_options_are_slurms():
    options, wrong = directives(SBATCH)
    assert not wrong and len(options) == SBATCH.count("\n#SBATCH ") == 13
    # One task a node with all its GPUs. Every run.sh saves before the limit (no "B:"). A job may be requeued, and inherits no
    # variable.
    assert (options["ntasks-per-node"], options["gpus-per-node"], options["mem"]) == ("1", "8", "0")
    assert {"exclusive", "requeue"} <= set(options)
    assert (options["export"], options["propagate"], options["open-mode"]) == ("NIL", "NONE", "append")
    warning = re.fullmatch(FORMS["signal"], options["signal"])
    assert warning and warning["signal"] in ("USR1", "TERM") and ":" not in options["signal"]
    # run.sh does not restart within the last ten minutes of a job, so the signal must come within them.
    assert 120 <= int(warning["seconds"]) <= 600


@pytest.mark.parametrize(
    "line", ["--ntask-per-node=1", "--signal=USR1:300", "--time=1day", "--nodes", " --mem=0", "--open-mode=appended"]
)
def test_sbatch_options_that_slurm_would_not_take_are_found(line: str):
    wrong = f"#SBATCH {line}" if line[0] == "-" else f"# SBATCH{line}"
    assert directives(f"#!/bin/bash\n{wrong}\ntrue\n")[1] == [wrong]
    assert directives("#!/bin/bash\ntrue\n#SBATCH --mem=0\n")[1], "after a command"


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
    """The batch script in an environment with Slurm's variables alone. `plans`: for each node, the exit code of a fake run, or
    `wait`.
    """

    def __init__(self, folder: Path):
        self.folder = folder / "a folder"
        self.bin = folder / "bin"
        for path, text in (
            (self.bin / "srun", SRUN),
            (self.bin / "scontrol", '#!/bin/bash\necho "$@" >>"$SLURM_SUBMIT_DIR/requeued"\nexit "${FAKE_SCONTROL:-0}"\n'),
            (self.folder / "run.sh", RUN),
        ):
            script(path, text)

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
        """Run the script. Returns (exit code, stderr, arguments of each call of scontrol)."""
        process = self.begin(*plans, arguments=arguments, **env)
        stderr = process.communicate(timeout=HUNG_S)[1]
        asked = self.folder / "requeued"
        return process.returncode, stderr, asked.read_text().splitlines() if asked.exists() else []

    def words(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "queued"),
    [
        *[((0, code), "", code, False) for code in (0, *FOR_GOOD)],
        *[((75, code), "3", code, True) for code in AGAIN],
        ((75, 76), "", 76, False),  # a single diverged node ends the job
        ((75,), "19", 75, True),
        ((75,), "20", 75, False),
    ],
)
def test_a_job_is_queued_again_where_it_asks_for_it(job: Job, codes: tuple[int, ...], restarts: str, code: int, queued: bool):
    ended, stderr, asked = job.run(*codes, **({"SLURM_RESTART_COUNT": restarts} if restarts else {}))
    assert ended == code
    assert asked == (["requeue Incomplete 4711"] if queued else [])
    if queued:
        assert stderr == f"slurm.sbatch: exit {code}: queued again, time {int(restarts) + 1} of 20\n"
    else:
        assert ("not queued again, after 20 times (most_requeues=20)" in stderr) == (restarts == "20")


def test_a_requeue_that_slurm_refuses_fails_the_job(job: Job):
    assert job.run(75, FAKE_SCONTROL="1")[0] != 0


def test_the_signal_before_the_time_limit(job: Job):
    """Slurm sends SIGUSR1 to the step's tasks, not to the batch script. The script then requeues the job, and exits with 75."""
    process = job.begin("wait", "wait")
    for i in range(2):
        wait_for(lambda i=i: (job.folder / f"listens-{i}").exists())
        os.kill(int(*job.words(f"task-{i}")), signal.SIGUSR1)
    assert process.wait(timeout=HUNG_S) == 75
    assert job.words("requeued") == ["requeue Incomplete 4711"]
    process.communicate()


def test_submitted_from_another_folder(job: Job, tmp_path: Path):
    (tmp_path / "other").mkdir()
    code, stderr, asked = job.run(0, SLURM_SUBMIT_DIR=str(tmp_path / "other"))
    assert (code, asked) == (2, []) and f"no run.sh in {tmp_path / 'other'}: submit from the repository's folder" in stderr


def test_what_the_nodes_of_a_job_are_told(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPO)
    more = ("--config.train.steps=3000", "--config.log.every_steps=2")
    code, _, _ = job.run(0, 0, arguments=more, SLURM_JOB_END_TIME="4102444800")
    assert code == 0
    # Options of srun: without the first, nodes would have no PATH. Without the last, one exit would interrupt a save.
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
        assert run.train.global_batch == 256 == 16 * run.train.grad_accum  # the config's argument was gpus=16
        # Three places: shared data, shared checkpoints, and the node's own disk.
        assert loaded.options["workdir"] == f"{folder}/runs/llama3_8b"
        assert run.paths.data == f"{folder}/data" and run.data.source.startswith(run.paths.data)
        assert run.paths.cache == "/tmp/ada/jaxtrain/compile"
