"""What preflight reads of a live node, with fakes of NVML and of commands.

Commands that hang are killed, and a recording gives the verdict of the live node.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
from nodes import H200, a_plain_environment, faults  # noqa: F401
from played_nvml import Gpu, Nvml

from jaxtrain.commands import preflight as command
from jaxtrain.metrics import gpu_facts
from jaxtrain.node import facts, machine
from jaxtrain.node.facts import BOOST, LOG, TOPOLOGY, Answer, read_facts, read_recording
from jaxtrain.report.preflight import NOTE, OK

REPO = Path(__file__).parents[2]
SECRETS = {
    "https_proxy": "http://me:hu@sh@proxy:3128",
    "all_proxy": "me:hush@proxy:3129",
    **dict.fromkeys(("JAXTRAIN_TOKEN", "JAXTRAIN_PASS", "JAX_KEY", "SLURM_WEBHOOK"), "hush"),
}


def fake_commands(tmp_path: Path, monkeypatch, body: str) -> None:
    """Put fakes of nvidia-smi and dmesg first on PATH, which run `body`. The process that reads NVML is a third one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("nvidia-smi", "dmesg", "read_nvml"):
        script = folder / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(facts, "NVML", "read_nvml")  # with the file of its answer


def alive(pid: str) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_commands_that_hang_are_given_up_and_killed(tmp_path, monkeypatch, capsys):
    """The child keeps its parent's output open, as a shell script's child would."""
    pids = tmp_path / "pids"
    fake_commands(tmp_path, monkeypatch, f"echo $$ >> {pids}; sleep 1000 & exec sleep 1000")
    code = command.main(["--limit=4", "--no-measure", "--json", f"--workdir={tmp_path}"])  # a command gets half of the limit
    found = faults(json.loads(capsys.readouterr().out))
    assert code == 3 and all(each in found["NVML"]["seen"] for each in ("NVML", TOPOLOGY, BOOST))
    started = pids.read_text().split()
    until = time.monotonic() + 120
    while (left := [pid for pid in started if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(started) == 4 and not left


def test_commands_run_at_the_same_time_and_say_why_they_failed(tmp_path, monkeypatch):
    """Each fake command waits until all have started, and then fails. Each answer has the command's exit code and output."""
    begun = tmp_path / "begun"
    begun.mkdir()
    all_begun = f"[ $(ls {begun} | wc -l) -ge 4 ]"
    fake_commands(tmp_path, monkeypatch, f"touch {begun}/$$; until {all_begun}; do sleep 0.05; done; echo so it is; exit 9")
    found = read_facts({}, command_s=300.0)
    assert {each: (found.run(each).code, found.run(each).error) for each in (TOPOLOGY, BOOST, LOG)} == dict.fromkeys(
        (TOPOLOGY, BOOST, LOG), (9, "so it is")
    )
    assert found.nvml == {"error": "NVML: so it is", "hangs": False}
    assert found.run("no-such-command-here").error and not Answer(0, "done").error


def test_what_is_recorded_is_judged_alike(tmp_path, monkeypatch, capsys):
    """The node answers as the healthy one. A recording gives the checks of the live run that wrote it, and contains no secrets
    and no line of the kernel's log that is not the driver's.
    """
    healthy = json.loads((H200 / facts.FILE).read_text())
    for name, text in (("nvml", json.dumps(healthy["nvml"])), ("topo", healthy["commands"][TOPOLOGY]["out"])):
        (tmp_path / name).write_text(text)
    log = "[    1.0] a secret of somebody else: hush\\n[   11.8] NVRM: loading NVIDIA UNIX Open Kernel Module\\n"
    cases = (
        f'read_nvml*) cp {tmp_path}/nvml "$1" ;;',
        f"*topo*) cat {tmp_path}/topo ;;",
        f"dmesg*) printf '{log}' ;;",
        "*) exit 2 ;;",
    )
    fake_commands(tmp_path, monkeypatch, "\n".join(['case "$(basename "$0") $*" in', *cases, "esac"]))
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    checks = []
    for option in ("--record", "--recorded"):
        command.main(["--json", "--no-measure", f"--workdir={tmp_path}", f"{option}={tmp_path / 'kept'}"])
        checks.append({c["name"]: c for c in json.loads(capsys.readouterr().out)["nodes"][0]["checks"]})
    assert checks[0] == checks[1]
    assert [checks[0][name]["state"] for name in ("topology", "ECC", "Xid", "variables")] == [OK, OK, OK, NOTE]
    (text,) = [path.read_text() for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert "hush" not in text and "hu@sh" not in text and "NVRM" in text
    assert all(f'"{value}"' in text for value in ("http://proxy:3128", "proxy:3129"))


def test_the_process_that_reads_nvml(tmp_path, monkeypatch):
    """A driver that is not there is an answer, not a failure. What a library prints at the end does not matter."""
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(lambda: print('bye'))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = read_facts({}).nvml
    assert {"driver", "gpus"} <= set(found) or found["loaded"] is False


def test_a_process_that_crashes_is_no_machine_without_gpus(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = read_facts({})
    assert "-6" in found.nvml["error"] and not found.nvml["hangs"] and machine.read_gpus(found).broken


def test_ctrl_c_ends_commands_that_hang(tmp_path):
    """They would else run until their time limit."""
    script = f"""
import sys
from jaxtrain.node import facts
facts.NVML = "sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'"
facts.read_facts({{}}, 900.0)
"""
    begun = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while (
        not (pid := (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else "") and time.monotonic() < until
    ):
        time.sleep(0.05)
    assert pid and alive(pid)
    begun.send_signal(signal.SIGINT)
    begun.wait(60)
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_every_fact_of_a_gpu():
    found = gpu_facts.read_gpu_facts(Nvml(Gpu(ecc=2, action=4, used=2**30)))
    (gpu,) = found["gpus"].values()
    assert found["driver"] == "580.65.06" and set(gpu) == {*gpu_facts.READINGS, "refused"} and not gpu["refused"]
    assert gpu["memory"] == {"total_gib": 141.0, "used_gib": 1.0} and gpu["processes"] == [
        "a process (pid 8)",
        "python3 (pid 7)",
    ]
    assert (gpu["power_limit_set_w"], gpu["power_limit_w"], gpu["power_limit_default_w"]) == (650, 700, 700)
    assert (gpu["max_sm_clock_mhz"], gpu["application_clock_mhz"], gpu["default_clock_mhz"]) == (1980, 1755, 1980)
    assert (gpu["mig"], gpu["ecc_uncorrected"], gpu["recovery_action"]) == (False, 2, "Drain and Reset")
    assert gpu["remapped_rows"] == {"correctable": 4, "uncorrectable": 1, "pending": 0, "failed": 0}
    assert gpu["pcie"] == {"width": 8, "max_width": 16, "gen": 1, "max_gen": 5}
    assert gpu["fabric"] == {"state": "Completed", "status": "Success"} and gpu["compute_capability"] == "9.0"
    assert gpu["nvlinks"] == {"up": [*range(16)], "down": [16, 17], "gb_s": [26.562]}
    assert gpu["nvlink_errors"] == {"recovery": {"5": 3}}


def test_what_a_driver_refuses_is_left_out():
    wanted = frozenset({"nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"})
    gpu = gpu_facts.read_gpu_facts(Nvml(Gpu(broken=wanted, fabric=pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)))["gpus"]["0"]
    left_out = {"remapped_rows", "fabric", "recovery_action", "nvlinks", "nvlink_errors"}
    assert set(gpu["refused"]) == left_out and not left_out & set(gpu) and "Not Supported" in gpu["refused"]["fabric"]
    alone = gpu_facts.read_gpu_facts(Nvml(Gpu(links=0)))["gpus"]["0"]
    assert alone["nvlinks"] == {"up": [], "down": [], "gb_s": []} and alone["nvlink_errors"] == {}


def test_links_of_newer_gpus():
    """Idle links may sleep, and Blackwell counts recoveries in a field of its own."""
    gpu = Gpu(asleep=True, broken=frozenset({"nvmlDeviceGetNvLinkErrorCounter"}))
    found = gpu_facts.read_gpu_facts(Nvml(gpu))["gpus"]["0"]
    assert found["nvlinks"]["up"] == [*range(16)] and found["nvlink_errors"] == {"recovery": {"6": 7}}


def test_an_error_of_one_reading_costs_that_fact():
    """pynvml raises errors of its own, and texts may not be UTF-8. A GPU that answers nothing is broken."""

    class Odd(Nvml):
        def DeviceGetComputeRunningProcesses(self, gpu):
            raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

        def SystemGetDriverVersion(self):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

        def DeviceGetMigMode(self, gpu):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    found = gpu_facts.read_gpu_facts(Odd(Gpu(fabric=7, action=12)))
    gpu = found["gpus"]["0"]
    assert set(gpu["refused"]) == {"processes", "mig"} and "error" not in gpu and found["driver"] == ""
    assert gpu["fabric"]["state"] == "number 7" and gpu["recovery_action"] == "number 12"

    class Mute(Nvml):
        def __getattr__(self, name):
            if name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetEccMode"):
                return lambda *_: (_ for _ in ()).throw(pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN))
            return super().__getattr__(name)

    gpu = gpu_facts.read_gpu_facts(Mute(Gpu()))["gpus"]["0"]
    assert gpu["error"] == "Unknown Error" and gpu["reset"] is False and gpu["name"] == "NVIDIA H200"


class Library:
    """NVML's C functions as Python functions that fill what their arguments point to, for pynvml's own bindings.

    filled: name of a function -> what it writes to each of the places that it is given: a number, bytes, or the fields of a
    struct; or a function of all arguments, which writes by itself and returns NVML's error.
    """

    def __init__(self, **filled: Any):
        self.filled = filled

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            values = self.filled.get(name, ())
            if callable(values):
                return values(*args)
            places = [getattr(arg, "_obj", arg) for arg in args if hasattr(arg, "_obj") or isinstance(arg, ctypes.Array)]
            for place, value in zip(places, values, strict=False):
                for field, each in value.items() if isinstance(value, dict) else [("value", value)]:
                    setattr(place, field, each)
            return pynvml.NVML_SUCCESS

        return call


def test_pynvml_itself_is_asked_as_it_wants_to_be(monkeypatch):
    """A struct that is passed by value, for one, would end the process in the real library."""

    def state(_, link, up):
        up._obj.value = 1
        return pynvml.NVML_SUCCESS if link < 4 else pynvml.NVML_ERROR_INVALID_ARGUMENT

    def errors(_, link, kind, count):
        count._obj.value = 9 if (link, kind) == (2, pynvml.NVML_NVLINK_ERROR_DL_REPLAY) else 0
        return pynvml.NVML_SUCCESS

    def fields(_, count, values):
        for value in values._obj:
            action = value.fieldId == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            value.valueType, value.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 1 if action else 26_562 + value.scopeId
        return pynvml.NVML_SUCCESS

    of_driver = {"nvmlSystemGetDriverVersion": (b"580.126.09",), "nvmlSystemGetCudaDriverVersion": (13000,)}
    of_gpu = {
        "GetName": (b"NVIDIA H200",),
        "GetUUID": (b"GPU-1",),
        "GetPciInfo_v3": ({"busId": b"00000000:18:00.0"},),
        "GetCudaComputeCapability": (9, 0),
        "GetMemoryInfo_v2": ({"total": 141 << 30, "used": 3 << 30},),
        "GetMigMode": (1, 0),
        "GetEccMode": (1, 1),
        "GetTotalEccErrors": (2,),
        "GetRemappedRows": (4, 3, 0, 1),
        "GetEnforcedPowerLimit": (500_000,),
        "GetPowerManagementLimit": (650_000,),
        "GetPowerManagementDefaultLimit": (700_000,),
        "GetMaxClockInfo": (1980,),
        "GetApplicationsClock": (1755,),
        "GetDefaultApplicationsClock": (1900,),
        "GetCurrentClocksThrottleReasons": (0x20,),
        "GetCurrPcieLinkWidth": (8,),
        "GetMaxPcieLinkWidth": (16,),
        "GetCurrPcieLinkGeneration": (4,),
        "GetMaxPcieLinkGeneration": (5,),
        "GetGpuFabricInfo": ({"state": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS},),
        "GetNvLinkState": state,
        "GetNvLinkErrorCounter": errors,
        "GetFieldValues": fields,
    }
    library = Library(
        nvmlDeviceGetCount_v2=(1,), **of_driver, **{f"nvmlDevice{name}": values for name, values in of_gpu.items()}
    )
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    found = gpu_facts.read_gpu_facts(pynvml)
    assert found == {
        "driver": "580.126.09",
        "cuda": "13.0",
        "gpus": {
            "0": {
                "refused": {},
                "name": "NVIDIA H200",
                "uuid": "GPU-1",
                "pci": "00000000:18:00.0",
                "compute_capability": "9.0",
                "memory": {"total_gib": 141.0, "used_gib": 3.0},
                "processes": [],
                "mig": True,
                "ecc": True,
                "ecc_uncorrected": 2,
                "remapped_rows": {"correctable": 4, "uncorrectable": 3, "pending": 0, "failed": 1},
                "recovery_action": "Reset",
                "power_limit_w": 500.0,
                "power_limit_set_w": 650.0,
                "power_limit_default_w": 700.0,
                "max_sm_clock_mhz": 1980,
                "max_memory_clock_mhz": 1980,
                "application_clock_mhz": 1755,
                "default_clock_mhz": 1900,
                "clock_reasons": 0x20,
                "pcie": {"width": 8, "max_width": 16, "gen": 4, "max_gen": 5},
                "fabric": {"state": "In Progress", "status": ""},
                "nvlinks": {"up": [0, 1, 2, 3], "down": [], "gb_s": [26.562, 26.563, 26.564, 26.565]},
                "nvlink_errors": {"replay": {"2": 9}},
            }
        },
    }


def test_gpus_that_the_driver_does_not_reach():
    """Of a GPU in another job's hands nothing is told."""
    states = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_NO_PERMISSION)
    found = gpu_facts.read_gpu_facts(Nvml(Gpu(), *(Gpu(lost=True, error=error) for error in states)))["gpus"]
    assert {i: (bool(gpu.get("error")), gpu.get("reset")) for i, gpu in found.items()} == {
        "0": (False, None),
        "1": (True, False),
        "2": (True, True),
    }
    assert gpu_facts.read_gpu_facts(Nvml(driver=False)) == {"error": "NVML: Driver Not Loaded", "loaded": False}


def test_this_machine_with_a_jax_that_cannot_be_imported(tmp_path):
    """Preflight exists to explain faults such as this one, so it must give its findings without jax. Its verdict is unknown
    here, but its output has the documented form.
    """
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text('raise RuntimeError("jaxlib is incompatible")\n')
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    argv = [sys.executable, "-m", "jaxtrain", "preflight", "--limit=30", f"--json={tmp_path}/found.json"]
    ended = subprocess.run(argv, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=120)
    assert "Traceback" not in ended.stderr, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.returncode == found["exit_code"] and found["exit_code"] in (0, 3) and ended.stdout.strip()
    assert set(found) == {"format", "verdict", "exit_code", "seconds", "time", "nodes"}
    assert {"name", "state", "expected", "seen", "why", "fix", "node"} == set(found["nodes"][0]["checks"][0])


def test_the_disks_of_this_machine(tmp_path):
    disks = read_facts({"checkpoints": str(tmp_path / "not" / "there"), "bucket": "gs://b/x"}).disks
    assert disks["checkpoints"].total_gib > 0 and disks["checkpoints"].kind != "unknown" and "bucket" not in disks
    assert read_recording(H200).disks["data"].kind == "xfs"
