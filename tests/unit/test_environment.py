"""The environment of a run: variables that it sets, variables that the shell may set, and variables that are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import environment, hardware
from jaxtrain.config.hardware import HOST_LIMIT, Devices
from jaxtrain.config.launch import resolve_config
from jaxtrain.config.schema import RunConfig, default_config
from jaxtrain.step.validate import validate

H200 = Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)
CPU = Devices("cpu", "cpu", 8, 3.0, "described")
# Harmless variables of a shell on a GPU node: those of images, of network settings, and of requests to the scheduler.
USUAL = {
    "PATH": "/usr/bin",
    "CUDA_VERSION": "12.9.1",
    "NCCL_VERSION": "2.28.3",
    "CUDA_HOME": "/usr/local/cuda",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "NCCL_SOCKET_IFNAME": "eth0",
    "JAX_PLATFORMS": "cuda",
    "JAX_COORDINATOR_ADDRESS": "node1",
    "JAX_COORDINATOR_PORT": "1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_LOCAL_DEVICE_IDS": "0",
    "HTTP_PROXY": "http://proxy:3128",
}


def run(**env: Any) -> RunConfig:
    config = default_config()
    config.env.update(env)
    found, problems = resolve_config(config)
    assert not problems
    return found


def test_the_usual_shell_is_taken_and_recorded():
    overlay, problems = environment.overlay(run(), H200, USUAL)
    assert not problems
    assert overlay.inherited == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert overlay.set == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_DEBUG": "WARN",
        "XLA_CLIENT_MEM_FRACTION": str(hardware.memory_fraction(140.0)),
        HOST_LIMIT: str(int(hardware.pinned_limit_gib({}))),
    }
    said = "\n".join(overlay.lines())
    assert all(f"{name}={value} " in said for name, value in (overlay.set | overlay.inherited).items())


def test_the_shell_stands_above_the_table():
    shell = {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        HOST_LIMIT: "900",
        "NCCL_ALGO": "",
    }
    overlay, problems = environment.overlay(run(), H200, shell)
    assert not problems and not overlay.set.keys() & shell.keys()
    assert overlay.inherited == {name: value for name, value in shell.items() if value}
    said = {line.split("=")[0].removeprefix("environment: "): line for line in overlay.lines()}
    assert "INFO" in said["NCCL_DEBUG"] and "WARN" in said["NCCL_DEBUG"], "the default that it replaces"
    assert environment.gpu_table(90)["CUDA_DEVICE_MAX_CONNECTIONS"][1] in said["CUDA_DEVICE_MAX_CONNECTIONS"]
    overlay, problems = environment.overlay(run(), CPU, shell)
    assert not problems and not overlay.set and overlay.inherited == {name: value for name, value in shell.items() if value}


@pytest.mark.parametrize("devices", [H200, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("name", "refused", "taken"),
    [
        ("JAX_ENABLE_X64", ("1", "True", "on"), ("0", "False", "")),
        ("JAX_DISABLE_JIT", ("1",), ("off", "")),
        ("JAX_NO_TRACING", ("1",), ("0",)),
        ("JAX_NO_EXECUTION", ("1",), ("0",)),
        ("JAX_NUMPY_DTYPE_PROMOTION", ("strict",), ("standard",)),
        ("JAX_THREEFRY_PARTITIONABLE", ("0",), ("1",)),
        ("JAX_DEFAULT_MATMUL_PRECISION", ("highest",), ("",)),
        ("NVIDIA_TF32_OVERRIDE", ("0", "1"), ("",)),
        ("XLA_FLAGS", (), ("--xla_backend_optimization_level=1",)),
        ("MOCK_NUM_GPU_PROCESSES", (), ("2",)),  # JAX does not read it
    ],
)
def test_what_ends_jax_or_changes_results_is_refused(
    devices: Devices, name: str, refused: tuple[str, ...], taken: tuple[str, ...]
):
    for value in refused:
        (problem,) = environment.overlay(run(), devices, USUAL | {name: value})[1]
        assert (problem.key, problem.value) == (name, value)
    for value in taken:
        assert not environment.overlay(run(), devices, USUAL | {name: value})[1]


def test_a_config_may_name_what_the_shell_may_not_set():
    shell = {"JAX_DEFAULT_PRNG_IMPL": "rbg"}
    assert environment.overlay(run(), CPU, shell)[1]
    overlay, problems = environment.overlay(run(set="JAX_DEFAULT_PRNG_IMPL=unsafe_rbg"), CPU, shell)
    assert not problems and overlay.set == {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg"}


def test_secrets_and_where_libraries_lie_are_no_part_of_it():
    places = ("CUDA_DIR", "CUDA_INSTALL_PATH", "CUDNN_HOME", "NCCL_HOME", "NCCL_INCLUDE_DIR", "TF_VAR_region")
    assert environment.select_variables(dict.fromkeys(places, "/x")) == {}
    shell = {"TF_TOKEN_app": "s3cret", "XLA_AUTH_HEADER": "s3cret", "JAX_X_API_KEY": "s3cret", "NCCL_ALGO": "Ring"}
    overlay, problems = environment.overlay(run(), H200, shell)
    assert not problems and overlay.inherited == {"NCCL_ALGO": "Ring"} and "s3cret" not in "".join(overlay.lines())


def test_the_config_stands_above_table_and_shell():
    asked = run(set="NCCL_CROSS_NIC=1, CUDA_DEVICE_ORDER=FASTEST_FIRST,NCCL_IB_HCA=mlx5_0+mlx5_1")
    overlay, problems = environment.overlay(asked, H200, USUAL | {"NCCL_CROSS_NIC": "2"})
    assert not problems
    expected = {"NCCL_CROSS_NIC": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}
    assert overlay.set.items() >= expected.items() and "NCCL_CROSS_NIC" not in overlay.inherited
    (line,) = (line for line in overlay.lines() if "NCCL_CROSS_NIC=1" in line)
    assert line.endswith("2)"), "the shell's value"
    assert environment.overlay(asked, CPU, {})[0].set == expected


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("NCCL_DEBUG", "env.set"),
        ("A B=1", "env.set"),
        ("A=1,A=2", "env.set"),
        ("LD_LIBRARY_PATH=/x", "env.set"),  # read before the program starts
        ("JAXTRAIN_COORDINATOR=a:1", "env.set"),
        ("HF_TOKEN=hf_x", "env.set"),
        (f"{HOST_LIMIT}=9", "env.set"),  # checks of the config read it
        ("XLA_CLIENT_MEM_FRACTION=0.5", "env.set"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE=false", "env.set"),
        ("TF_FORCE_UNIFIED_MEMORY=1", "env.set"),
        ("JAX_DISABLE_JIT=1", "env.set"),  # no run can train with it
    ],
)
def test_mistakes_are_told_once_and_without_secrets(text: str, key: str):
    (problem,) = environment.overlay(run(set=text), H200, {})[1]
    assert problem.key == key and problem.remedy and "hf_x" not in str(problem)


def test_what_an_earlier_run_of_the_process_has_set_is_not_the_shells():
    left = {"NCCL_DEBUG": "INFO", "JAX_PLATFORMS": "cpu", "XLA_CLIENT_MEM_FRACTION": "0.5"}
    recorded = {environment.EXPORTED: json.dumps(left)}
    overlay, problems = environment.overlay(run(), H200, left | recorded)
    assert not problems and not overlay.inherited and overlay.set["NCCL_DEBUG"] == "WARN"
    overlay, _ = environment.overlay(run(), H200, left | recorded | {"NCCL_DEBUG": "TRACE"})
    assert overlay.inherited == {"NCCL_DEBUG": "TRACE"}, "a user has set it between the runs"


def test_what_processes_must_have_alike():
    shell = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring", "NCCL_DEBUG_SUBSYS": "NET"}
    found = environment.overlay(run(set="NCCL_CROSS_NIC=1"), H200, shell)[0].common()
    assert found.items() >= {"NCCL_ALGO": "Ring", "NCCL_CROSS_NIC": "1"}.items()
    assert not found.keys() & {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", HOST_LIMIT}


def test_deterministic_sums():
    asked = run()
    asked = dataclasses.replace(asked, train=dataclasses.replace(asked.train, deterministic=True))
    assert environment.overlay(asked, H200, {})[0].set["NCCL_ALGO"] == hardware.NCCL_ALGO
    other = dataclasses.replace(asked, env=dataclasses.replace(asked.env, set="NCCL_ALGO=Ring"))
    for refused, shell in ((asked, {"NCCL_ALGO": "NVLS"}), (other, {})):
        (problem,) = environment.overlay(refused, H200, shell)[1]
        assert "train.deterministic" in problem.rule and problem.key == ("NCCL_ALGO" if shell else "env.set")


def test_each_generation_has_its_table():
    for sm, known in ((80, 80), (89, 80), (90, 90), (103, 100)):
        assert environment.gpu_table(sm) is environment.TABLES[known]
    assert environment.gpu_table(75) is environment.ALL


def test_the_environment_of_a_run_is_validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = default_config()
    config.data.source = "synthetic"
    config.train.global_batch = 8
    asked = resolve_config(config)[0]
    assert not validate(asked, H200, tmp_path)
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    assert [p.key for p in validate(asked, H200, tmp_path)] == ["JAX_DISABLE_JIT"]
