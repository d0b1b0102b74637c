"""FLOPs and parameter counts against figures that others publish, and against counting by hand."""

import dataclasses

import pytest

from jaxtrain import flops, hardware, launch
from jaxtrain.activations import ACTIVATIONS, GEMM_OUTPUTS, KEPT, parse_tensors
from jaxtrain.bench import __main__ as bench
from jaxtrain.bench import measure
from jaxtrain.bench.work import one_device
from jaxtrain.config import ConfigError, Experts, Model, Remat, RunConfig, Train
from jaxtrain.models.llama import PRESETS
from jaxtrain.parity import layouts
from jaxtrain.validate import validate_step

SMALL = Model(num_layers=6, d_model=64, num_heads=8, num_kv_heads=2, head_dim=16, d_ff=160, vocab_size=100)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama2_7b", 6.738), ("llama3_8b", 8.030), ("llama3_70b", 70.554), ("llama3_1b", 1.236)],
)
def test_parameters_of_published_models(preset, billions):
    parts = flops.parameters(Model(**PRESETS[preset]))
    assert parts["total"] / 1e9 == pytest.approx(billions, abs=1e-3)
    assert sum(n for part, n in parts.items() if part != "total") == parts["total"]
    assert preset != "llama3_8b" or parts["total"] == 8_030_261_248, "to the last norm"


def test_llama3_8b_flops_per_token():
    """51.47 GFLOP is what Megatron and MaxText count for it at 8192; the whole square adds another 6.44."""
    f = flops.per_token(Model(**PRESETS["llama3_8b"]), 8192)
    assert f.causal == pytest.approx(51.47e9, rel=5e-3)
    assert f.full - f.causal == pytest.approx(6 * 32 * 4096 * 8192)


def test_full_convention_is_palms():
    """6 N + 12 L H Q T, with N the weights that are multiplied: without the embedding, with the head."""
    parts = flops.parameters(SMALL)
    weights = parts["attention"] + parts["mlp"] + parts["head"]
    assert flops.per_token(SMALL, 32).full == 6 * weights + 12 * 6 * 8 * 16 * 32


def test_tied_head_is_computed_but_has_no_parameters():
    tied = dataclasses.replace(SMALL, tied_head=True)
    assert flops.per_token(tied, 32) == flops.per_token(SMALL, 32)
    assert flops.parameters(SMALL)["total"] - flops.parameters(tied)["total"] == 100 * 64


def test_small_vectors_are_counted():
    more = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True)
    per_layer = (8 + 2 + 2) * 16 + 2 * 16
    assert flops.parameters(more)["total"] - flops.parameters(SMALL)["total"] == 6 * per_layer


@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_sliding_window_limits_the_causal_count(window):
    seq_len = 64
    exact = sum(min(t + 1, window) for t in range(seq_len)) / seq_len
    got = flops.attention(dataclasses.replace(SMALL, sliding_window=window), seq_len)
    # The convention counts half a square and half a band: half a position less than the exact sum.
    assert got.causal / (4 * 8 * 16) == pytest.approx(exact, abs=0.51)
    assert got.full == 4 * 8 * 16 * seq_len


def test_recompute_by_policy():
    layer = flops.gemms(SMALL)
    attention = flops.attention(SMALL, 32).causal

    def causal(**remat):
        return flops.recompute(SMALL, Remat(**remat), 32).causal

    assert causal(policy="none") == 0
    assert causal(policy="dots") == 6 * attention
    assert causal(policy="full") == 6 * (sum(layer.values()) - layer["mlp_down"] + attention)
    assert causal(policy="attention") == 6 * (layer["attention_proj"] + layer["mlp_gate"] + layer["mlp_up"])
    # Layers that share a checkpoint: all but the last of each group have their output made again (3 groups of 2; 4 and 2).
    assert causal(policy="full", every=2) == causal(policy="full") + 3 * layer["mlp_down"]
    assert causal(policy="full", every=4) == causal(policy="full") + 4 * layer["mlp_down"]
    # A kept output without its log-sum-exp does not spare the kernel; the residual stream spares wo.
    most = "q=keep,k=keep,v=keep,mlp_gate=offload,mlp_up=keep"
    assert causal(policy="custom", tensors=most + ",residual=keep,attention_out=keep") == 6 * attention
    assert causal(policy="custom", tensors=most + ",residual=recompute") == 6 * (attention + layer["attention_proj"])


def test_recompute_with_norms_behind_the_products():
    """What is normed is read by the backward pass: keeping what comes out of the norm spares no product."""
    layer, attention = flops.gemms(SMALL), flops.attention(SMALL, 32).causal
    normed, post = dataclasses.replace(SMALL, qk_norm=True), dataclasses.replace(SMALL, post_norms=True)

    def causal(model, policy, tensors=""):
        return flops.recompute(model, Remat(policy=policy, tensors=tensors), 32).causal

    every = ",".join(f"{name}=keep" for name in ("q", "k", "v", "mlp_gate", "mlp_up", "residual"))
    assert causal(SMALL, "custom", every) == 6 * attention
    assert causal(normed, "custom", every) == 6 * (attention + layer["q"] + layer["k"])
    assert causal(post, "custom", every) == 6 * (attention + layer["attention_proj"] + layer["mlp_down"])
    assert causal(normed, "dots") == causal(post, "dots") == 6 * attention


def test_policies_name_activations():
    assert set(GEMM_OUTPUTS) == set(flops.gemms(SMALL))
    for names in KEPT.values():
        assert set(names) <= set(ACTIVATIONS)


def test_tensors_of_custom_remat():
    places, problems = parse_tensors("q=keep, mlp_up=offload,k=recompute")
    assert places == {"q": "keep", "mlp_up": "offload", "k": "recompute"} and not problems
    _, problems = parse_tensors("q,mlp_upp=keep,v=kep,k=keep,k=offload,mlp_gate =keep")
    assert [p.value for p in problems] == ["q", "mlp_upp=keep", "v=kep", "k=offload", "mlp_gate =keep"]
    assert "Did you mean mlp_up?" in str(problems[1]) and "Did you mean keep?" in str(problems[2])


def test_policy_keeps_what_the_model_says_it_keeps():
    from jaxtrain.models import remat

    assert set(remat.make_plan(Remat(policy="attention"), "layer", False, False, False).keep) == set(KEPT["attention"])


# Mixtral 8x7B (arXiv:2401.04088): 46.7 B parameters, 12.9 B of them used by a token. Qwen3-30B-A3B (arXiv:2505.09388): 30.5 B
# and 3.3 B.
MIXTRAL = Model(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336, vocab_size=32000, num_experts=8, experts_per_token=2
)
QWEN3 = Model(
    num_layers=48,
    d_model=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    d_ff=768,
    vocab_size=151_936,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
)


@pytest.mark.parametrize(("model", "total", "active"), [(MIXTRAL, 46.703, 12.880), (QWEN3, 30.532, 3.354)])
def test_parameters_of_published_experts(model, total, active):
    parts = flops.parameters(model)
    assert parts["total"] / 1e9 == pytest.approx(total, abs=1e-3)
    assert flops.active_parameters(model) / 1e9 == pytest.approx(active, abs=1e-3)
    assert sum(n for part, n in parts.items() if part != "total") == parts["total"]


FEW = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2, shared_d_ff=48)
EXPERTS = RunConfig(model=FEW, train=Train(freeze=""))


def test_experts_count_those_a_token_goes_through():
    """By hand: three matrices of each of two experts, of the shared one, and the router."""
    d = FEW.d_model
    mlp = 3 * 2 * d * (2 * FEW.d_ff + FEW.shared_d_ff) + 2 * d * 4
    dense = 3 * 2 * d * SMALL.d_ff
    assert flops.forward(FEW, 32).causal - flops.forward(SMALL, 32).causal == 6 * (mlp - dense)
    assert (
        flops.per_token(dataclasses.replace(FEW, num_experts=64), 32).full - flops.per_token(FEW, 32).full == 3 * 6 * 2 * d * 60
    )
    # 6 N of the PaLM paper, N the active weights that are multiplied.
    weights = flops.active_parameters(FEW) - FEW.vocab_size * d - flops.parameters(FEW)["norms"]
    assert flops.per_token(FEW, 32).full == 6 * weights + 12 * 6 * 8 * 16 * 32


def test_a_capacity_costs_its_places_and_is_in_no_mfu():
    one = 6 * 3 * 2 * 2 * FEW.d_model * FEW.d_ff  # forward FLOPs of all layers' experts, two for each token
    roomy = dataclasses.replace(EXPERTS, experts=Experts(capacity=1.5))
    assert flops.training(roomy) == flops.training(EXPERTS)
    assert flops.beyond(EXPERTS).causal == 0
    assert flops.beyond(roomy).causal == pytest.approx(3 * one * 0.5)
    tight = dataclasses.replace(EXPERTS, experts=Experts(capacity=0.5))
    assert flops.beyond(tight).causal == pytest.approx(-3 * one * 0.5), "dropped tokens are computed by nobody"
    full = dataclasses.replace(roomy, remat=Remat(policy="full"))
    again = flops.recompute(FEW, Remat(policy="full"), full.data.seq_len).causal
    assert flops.beyond(full).causal == pytest.approx(3 * one * 0.5 + again + one * 2 / 3 * 0.5), "gate and up a second time"
    frozen = dataclasses.replace(roomy, train=Train(freeze="layers.mlp.*"))
    assert flops.beyond(frozen).causal == pytest.approx(2 * one * 0.5)


def test_an_expert_that_is_alone_on_its_device_computes_its_spare_rows():
    """Two experts a token, and room for 1.25 even shares: the matmul of one expert takes all of that room."""
    few = dataclasses.replace(EXPERTS, experts=Experts(buffer=1.25))
    for ranks, rows in ((1, 2.0), (FEW.num_experts // 2, 2.0), (FEW.num_experts, 2.5)):
        spread = dataclasses.replace(few, mesh=dataclasses.replace(few.mesh, expert=ranks))
        assert flops.expert_rows(spread) == pytest.approx(rows)
    assert flops.expert_rows(dataclasses.replace(spread, experts=Experts(buffer=1.25, impl="ragged"))) == 2.0


def test_frozen_experts_have_no_gradients():
    frozen = dataclasses.replace(EXPERTS, train=Train(freeze="layers.mlp.gate,layers.mlp.router"))
    saved = flops.training(EXPERTS).causal - flops.training(frozen).causal
    assert saved == 6 * 2 * FEW.d_model * (2 * FEW.d_ff + 4)


def test_recompute_of_experts():
    layer, attention = flops.gemms(FEW), flops.attention(FEW, 32).causal
    dots = flops.recompute(FEW, Remat(policy="dots"), 32).causal
    assert dots == 6 * (attention + layer["router"])
    full = flops.recompute(FEW, Remat(policy="full"), 32).causal
    assert full == 6 * (sum(layer.values()) - layer["mlp_down"] + attention)


def test_muons_products_of_experts():
    """Each expert's three matrices are made orthogonal by themselves."""
    d, f, s = FEW.d_model, FEW.d_ff, FEW.shared_d_ff

    def one(a: int, b: int) -> float:
        a, b = min(a, b), max(a, b)
        return 5.0 * (4 * a * a * b + 2 * a**3)

    more = 6 * (3 * 3 * one(d, f) + 3 * one(d, s) + one(d, 4))
    assert flops.newton_schulz(FEW) - flops.newton_schulz(SMALL) == more


def test_mfu():
    assert flops.mfu(50e9, 10_000, 1000.0) == pytest.approx(0.5)
    assert flops.mfu(50e9, 10_000, None) is None
    assert flops.mfu(50e9, 10_000, 0.0) is None


@pytest.mark.parametrize(
    ("kind", "name", "bf16"),
    [
        ("NVIDIA H200", "H200 SXM", 989.4),
        ("NVIDIA H200 141GB HBM3e", "H200 SXM", 989.4),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312.0),
        ("A100-SXM4-40GB", "A100 SXM 40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312.0),
        ("NVIDIA GH200 480GB", "GH200 96GB", 989.4),
        ("NVIDIA B200", "B200", 2250.0),
        ("NVIDIA GB200", "GB200", 2500.0),
    ],
)
def test_known_gpus(kind, name, bf16):
    gpu = hardware.lookup(kind)
    assert gpu is not None and (gpu.name, gpu.peak("bf16")) == (name, bf16)


@pytest.mark.parametrize(
    "kind",
    ["", "cpu", "NVIDIA GB300", "NVIDIA H800", "NVIDIA H20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L4", "NVIDIA A100"],
)
def test_unknown_gpus_are_not_guessed(kind):
    assert hardware.lookup(kind) is None


def test_rates_are_dense():
    """Doubling from one format to the next narrower one, and no sparse rate among them."""
    for _, gpu in hardware.TABLE:
        assert gpu.tf32 == pytest.approx(gpu.bf16 / 2, rel=0.01)
        assert gpu.fp8 in (0.0, pytest.approx(2 * gpu.bf16, rel=0.01))
        assert gpu.source


def test_probe_counts_cpu_devices():
    base = {"JAX_PLATFORMS": "cpu"}
    assert hardware.probe(base).count == 1
    flags = base | {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4"}
    assert hardware.probe(flags).count == 4
    assert hardware.probe(flags | {"JAX_NUM_CPU_DEVICES": "8"}).count == 8


class FakeNvml:
    """The driver's interface, with as many GPUs as asked."""

    class NVMLError(Exception):
        pass

    def __init__(self, *names: str):
        self.names = names
        self.started = 0

    def nvmlInit(self):
        if not self.names:
            raise self.NVMLError("Driver Not Loaded")
        self.started += 1

    def nvmlShutdown(self):
        self.started -= 1

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{'1a2b' if handle < 2 else '7cc6'}{handle}-9d1e"

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"total": 141 * 2**30})

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)


def test_probe_counts_visible_gpus(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())
    nvml = FakeNvml(*["NVIDIA H200"] * 8)
    monkeypatch.setattr(hardware, "pynvml", nvml)
    assert hardware.probe({}) == hardware.Devices("gpu", "NVIDIA H200", 8, 141.0, "NVML", 90)
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": "2,3,5"}).count == 3
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": "GPU-1a2b1,9,2"}).count == 1, "CUDA stops at the first that is not there"
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": ""}).kind == "cpu"
    assert hardware.probe({"JAX_PLATFORMS": "cpu"}).kind == "cpu"
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("visible", "rule"),
    [
        ("MIG-b3fe6a2c-4e0b-5c2f-a1d4-0f6f2f5b1c11", "MIG-b3fe6a2c-4e0b-5c2f-a1d4-0f6f2f5b1c11 is a MIG slice"),
        ("0,MIG-GPU-1a2b1/1/0", "MIG-GPU-1a2b1/1/0 is a MIG slice"),
        ("GPU-1a2b", "2 GPUs have a UUID that begins with GPU-1a2b"),
        ("0,GPU-ffff", "no GPUs have a UUID that begins with GPU-ffff"),
        ("4", "there is no GPU '4'"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_by_name(monkeypatch, visible, rule):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())
    nvml = FakeNvml(*["NVIDIA H200"] * 4)
    monkeypatch.setattr(hardware, "pynvml", nvml)
    found = hardware.probe({"CUDA_VISIBLE_DEVICES": visible})
    assert (found.kind, found.count, nvml.started) == ("gpu", 0, 0), "the CPU is no substitute"
    assert found.problem is not None
    assert (found.problem.key, found.problem.value) == ("CUDA_VISIBLE_DEVICES", visible)
    assert found.problem.rule.startswith(rule) and "CUDA_VISIBLE_DEVICES=0" in found.problem.remedy
    (told,) = validate_step(launch.load([]).run, found)
    assert told is found.problem, "one mistake, one problem"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        measure.start(one_device(), 1)
    assert layouts.devices(2).problem is not None, "parity is not compared on CPUs instead"
    assert bench.main(["--kernels"]) == 2


def test_the_driver_takes_the_beginning_of_a_uuid(monkeypatch):
    nvml = FakeNvml(*["NVIDIA H200"] * 4)
    assert hardware.visible_handles("GPU-7cc63,GPU-1a2b0-9d1e", nvml) == [3, 0]


def test_a_driver_that_fails_is_a_problem(monkeypatch):
    """The run is refused: it was started on a machine with GPUs, and must not go on without them."""
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())
    nvml = FakeNvml("NVIDIA H200")

    def lost(handle):
        raise nvml.NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lost)
    monkeypatch.setattr(hardware, "pynvml", nvml)
    found = hardware.probe({})
    assert (found.kind, found.count, nvml.started) == ("gpu", 0, 0)
    assert found.problem is not None and "GPU is lost" in found.problem.rule


def test_probe_without_a_driver(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hardware, "pynvml", FakeNvml())
    found = hardware.probe({})
    assert found.kind == "cpu" and "Driver Not Loaded" in found.source
    asked = hardware.probe({"JAX_PLATFORMS": "cuda"})
    assert (asked.kind, asked.count) == ("gpu", 0), "what was asked for is not there; the CPU is no substitute"


MEMINFO = "MemTotal:       33554432 kB\nMemAvailable:   25165824 kB\n"


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({"proc/meminfo": MEMINFO}, 24.0),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "8589934592\n"}, 8.0),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "8589934592\n"}, 8.0),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 24.0),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4294967296\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            4.0,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/path/on/the/host\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
            },
            4.0,
        ),
    ],
    ids=["no cgroup", "v2", "v2, of a parent", "v2, no limit", "v1", "v1, in a container"],
)
def test_memory_that_is_available(tmp_path, files, gib):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware.available_gib(tmp_path) == gib


def test_without_proc_all_memory_is_available(tmp_path):
    assert hardware.available_gib(tmp_path) == pytest.approx(hardware.host_gib())


def test_memory_budget():
    assert hardware.memory_fraction(140.0) == pytest.approx(1 - hardware.RESERVE_GIB / 140.0, abs=1e-4)
    assert hardware.memory_fraction(8.0) == 0.75
    assert hardware.memory_fraction(140.0, 0.5) == 0.5
    exported, problems = hardware.memory_environment(0.95, {})
    assert exported == {"XLA_CLIENT_MEM_FRACTION": "0.95"} and not problems
    assert not hardware.memory_environment(0.95, exported)[1], "what we exported ourselves is no contradiction"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_CLIENT_MEM_FRACTION", "much"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("TF_FORCE_UNIFIED_MEMORY", "1"),
    ],
)
def test_contradicting_memory_variables(name, value):
    _, (problem,) = hardware.memory_environment(0.95, {name: value})
    assert problem.key == name and name in problem.remedy


def test_jax_reads_the_variable_that_is_exported(monkeypatch):
    """Canary: the name that this jax honours."""
    from jaxlib import xla_client

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    for name, value in hardware.memory_environment(0.875, {})[0].items():
        monkeypatch.setenv(name, value)
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.875
