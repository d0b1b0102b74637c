"""Machines by name: parsed descriptions, refusals, and the devices of a machine."""

import re
from types import SimpleNamespace

import jax
import pytest

from jaxtrain.config import hardware
from jaxtrain.config.schema import ConfigError
from jaxtrain.data import loading
from jaxtrain.plan.topology import CHIPS, TopologyError, devices, local_topology, parse_topology
from jaxtrain.sharding import make_placement


def test_a_name_is_chip_gpus_and_nodes():
    one, many = parse_topology("h200:8"), parse_topology("H200:8x16")
    assert (one.chip, one.gpus, one.nodes, one.total) == ("h200", 8, 1, 8)
    assert (many.chip, many.gpus, many.nodes, many.total) == ("h200", 8, 16, 128)
    assert (one.name, many.name) == ("h200:8", "h200:8x16")
    assert parse_topology(many.name) == many


@pytest.mark.parametrize("chip", CHIPS)
def test_descriptions_agree_with_the_table_of_gpus(chip):
    machine = parse_topology(f"{chip}:1")
    gpu = machine.gpu
    (device,) = devices(machine)
    assert (device.device_kind, device.platform) == (machine.device_kind, "gpu")
    major, minor = device.compute_capability.split(".")
    assert 10 * int(major) + int(minor) == gpu.sm
    # A GPU gives programs a little less than its nominal size, which is in GB or in GiB.
    assert 0.97 * gpu.hbm_gb * 1e9 < machine.memory_bytes < gpu.hbm_gb * 2**30
    bandwidth = re.search(r"memory_bandwidth: (\d+)", machine.description)
    assert bandwidth and int(bandwidth[1]) / 1e12 == pytest.approx(gpu.hbm_tb_s, rel=0.05)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("h200", "CHIP:GPUS"),
        ("", ""),
        ("h200:8x", ""),
        ("h200:-8", ""),
        ("h200:0", ""),
        ("h2000:8", "h200?"),
        ("h200:16x3", "h200:8x6"),
        ("h200:12", "h200:8"),
        ("h200_nvl:8", "h200_nvl:4x2"),
        ("h200:8x1000000", "131072"),
    ],
)
def test_what_is_no_machine_is_refused(text, word):
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    assert repr(text) in str(error.value) and word in str(error.value)


@pytest.mark.parametrize("text", ["h200:8", "gb200:72x4"])
def test_a_device_for_every_gpu_node_by_node(text):
    machine = parse_topology(text)
    found = devices(machine)
    assert [d.id for d in found] == list(range(machine.total))
    assert [d.process_index for d in found] == [i // machine.gpus for i in range(machine.total)]


class Described(SimpleNamespace):
    """A device with the attributes that a mesh reads."""

    __hash__ = object.__hash__


def test_a_mesh_is_laid_out_node_by_node():
    """fsdp stays inside a node and data crosses nodes, for any order of the devices."""
    given = devices(parse_topology("h200:4x2"))
    mixed = [*given[1::2], *given[::2]]
    for overrides, sizes in (([], (2, 4, 1, 1)), (["mesh.data=1"], (1, 8, 1, 1)), (["mesh.tensor=2"], (2, 2, 2, 1))):
        run = loading.load_config(["--config=configs/llama3_8b.py", *(f"--config.{o}" for o in overrides)]).run
        mesh = make_placement(run, mixed).mesh
        assert tuple(mesh.shape.values()) == sizes
        assert [d.id for d in mesh.devices.flat] == sorted(d.id for d in given)
    assert {d.process_index for d in make_placement(loading.load_config([]).run, mixed).mesh.devices[0].flat} == {0}
    # CUDA numbers the GPUs of several processes in any order: an id does not identify the node.
    turns = [Described(id=i, process_index=i % 2) for i in range(8)]
    assert [d.process_index for d in make_placement(loading.load_config([]).run, turns).mesh.devices.flat] == [0] * 4 + [1] * 4
    with pytest.raises(ConfigError, match="4, 3"):
        make_placement(loading.load_config([]).run, given[:7])


def test_the_machine_itself(monkeypatch):
    """There is no GPU here, so the test covers results that depend only on the devices' names and numbers."""

    def gpus(*kinds: str) -> list[Described]:
        found = [Described(platform="gpu", device_kind=kind, process_index=0) for kind in kinds]
        monkeypatch.setattr(jax, "devices", lambda: found)
        return found

    present = gpus(*["NVIDIA H200"] * 4)
    machine = local_topology()
    assert (machine.name, machine.description) == ("h200:4", "")
    assert machine.memory_bytes == parse_topology("h200:4").memory_bytes and devices(machine) == present
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA L4", 1, 22.5, "NVML", 89))
    gpus("NVIDIA L4")
    assert local_topology().memory_gib == 22.5
    with pytest.raises(TopologyError, match="NVIDIA L4"):
        _ = local_topology().gpu
    gpus("NVIDIA L4", "NVIDIA H200")
    with pytest.raises(TopologyError):
        local_topology()
