"""Machines by name: parsed descriptions, refusals, and the devices of a machine."""

import re
from types import SimpleNamespace

import jax
import pytest

from jaxtrain import hardware, launch
from jaxtrain.plan import topology
from jaxtrain.plan.topology import CHIPS, TopologyError, devices, here, parse
from jaxtrain.sharding import LayoutError, make_mesh


def test_a_name_is_chip_gpus_and_nodes():
    one, many = parse("h200:8"), parse("H200:8x16")
    assert (one.chip, one.gpus, one.nodes, one.total) == ("h200", 8, 1, 8)
    assert (many.chip, many.gpus, many.nodes, many.total) == ("h200", 8, 16, 128)
    assert (one.name, many.name) == ("h200:8", "h200:8x16")
    assert parse(many.name) == many


def test_an_h200_has_what_cuda_gives_programs():
    """The memory is neither the data sheet's 141 GB nor 141 GiB, but the bytes that CUDA gives to programs."""
    assert parse("h200:8").memory_gib == pytest.approx(139.80, abs=0.01)


@pytest.mark.parametrize("chip", CHIPS)
def test_descriptions_agree_with_the_table_of_gpus(chip):
    machine = parse(f"{chip}:1")
    gpu = machine.gpu
    (device,) = devices(machine)
    assert (device.device_kind, device.platform) == (machine.device_kind, "gpu")
    major, minor = device.compute_capability.split(".")
    assert 10 * int(major) + int(minor) == gpu.sm
    # A GPU gives programs a little less than its nominal size, which is in GB or in GiB.
    assert 0.97 * gpu.hbm_gb * 1e9 < machine.memory_bytes < gpu.hbm_gb * 2**30
    bandwidth = re.search(r"memory_bandwidth: (\d+)", machine.description)
    assert bandwidth and int(bandwidth[1]) / 1e12 == pytest.approx(gpu.hbm_tb_s, rel=0.05)
    assert machine.description.startswith("# ") and "Sources:" in machine.description


def test_every_description_is_a_chip():
    files = {p.name.removesuffix(".txtpb") for p in (topology.resources.files("jaxtrain.plan") / "specs").iterdir()}
    assert files == set(CHIPS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h200", "how many GPUs? Write CHIP:GPUS"),
        ("", "not of the form"),
        ("h200:", "not of the form"),
        ("h200:8x", "not of the form"),
        ("h200:-8", "not of the form"),
        ("h200:8x2x2", "not of the form"),
        ("h200:0", "0 GPUs in a node. Write at least 1"),
        ("h200:8x0", "0 nodes"),
        ("h2000:8", "Did you mean h200? Known: a100,"),
        ("tpu:8", "no chip 'tpu'. Known: a100,"),
        ("h200:16", "Write h200:8x2."),
        ("h200:16x3", "Write h200:8x6."),
        ("h200:12", "at most h200:8"),
        ("h200_nvl:8", "an NVLink bridge joins at most 4. Write h200_nvl:4x2."),
        ("h200:8x1000000", "at most 131072"),
    ],
)
def test_what_is_no_machine_is_refused(text, message):
    with pytest.raises(TopologyError, match=re.escape(message)) as error:
        parse(text)
    assert repr(text) in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("text", ["h200:8", "h200:8x16", "h200:8x128", "gb200:72x4"])
def test_a_device_for_every_gpu_node_by_node(text):
    machine = parse(text)
    found = devices(machine)
    assert [d.id for d in found] == list(range(machine.total))
    assert [d.process_index for d in found] == [i // machine.gpus for i in range(machine.total)]


class Described(SimpleNamespace):
    """A device with the attributes that a mesh reads."""

    __hash__ = object.__hash__


def test_a_mesh_is_laid_out_node_by_node():
    """fsdp stays inside a node and data crosses nodes, for any order of the devices."""
    given = devices(parse("h200:4x2"))
    mixed = [*given[1::2], *given[::2]]
    for overrides, sizes in (([], (2, 4, 1, 1)), (["mesh.data=1"], (1, 8, 1, 1)), (["mesh.tensor=2"], (2, 2, 2, 1))):
        run = launch.load(["--config=configs/llama3_8b.py", *(f"--config.{o}" for o in overrides)]).run
        mesh = make_mesh(run, mixed)
        assert tuple(mesh.shape.values()) == sizes
        assert [d.id for d in mesh.devices.flat] == sorted(d.id for d in given)
    assert {d.process_index for d in make_mesh(launch.load([]).run, mixed).devices[0].flat} == {0}
    # CUDA numbers the GPUs of several processes in any order: an id does not identify the node.
    turns = [Described(id=i, process_index=i % 2) for i in range(8)]
    assert [d.process_index for d in make_mesh(launch.load([]).run, turns).devices.flat] == [0] * 4 + [1] * 4
    with pytest.raises(LayoutError, match=r"different numbers of devices \(4, 3\)"):
        make_mesh(launch.load([]).run, given[:7])


def test_without_a_gpu_a_machine_must_be_named():
    with pytest.raises(TopologyError, match="has no GPU.*--topology=h200:8"):
        here()


class FakeGpu:
    platform = "gpu"

    def __init__(self, kind: str, process: int = 0):
        self.device_kind, self.process_index = kind, process


def test_the_machine_itself(monkeypatch):
    """There is no GPU here, so the test covers results that depend only on the devices' names and numbers."""
    present = [FakeGpu("NVIDIA H200") for _ in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: present)
    machine = here()
    assert (machine.name, machine.description) == ("h200:4", "")
    assert machine.memory_bytes == parse("h200:4").memory_bytes
    assert devices(machine) == present
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA L4", 1, 22.5, "NVML", 89))
    monkeypatch.setattr(jax, "devices", lambda: [FakeGpu("NVIDIA L4")])
    assert here().memory_gib == 22.5
    with pytest.raises(TopologyError, match="NVIDIA L4.*rates are not known"):
        _ = here().gpu
    monkeypatch.setattr(jax, "devices", lambda: [FakeGpu("NVIDIA L4"), FakeGpu("NVIDIA H200")])
    with pytest.raises(TopologyError, match="must be equal"):
        here()


def test_without_the_plugin_the_remedy_is_named(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match="run.sh setup.*JAX_PLATFORMS=cpu"):
        devices(parse("h200:8"))


def test_the_assembler_comes_with_the_plan_extra():
    """Without ptxas and libdevice XLA crashes, and a machine without CUDA has only those of the plan extra."""
    wheels = [folder for folder in topology._toolkits() if "site-packages" in folder.parts]
    found = [folder for folder in wheels if (folder / topology.LIBDEVICE).is_file()]
    assert found and all((folder / "bin" / "ptxas").is_file() for folder in found)


def test_without_an_assembler_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(topology, "_toolkits", lambda: [tmp_path])
    with pytest.raises(RuntimeError, match="install the plan extra"):
        topology.devices(topology.parse("h200:8"))
