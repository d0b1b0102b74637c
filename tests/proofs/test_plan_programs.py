"""Figures that plans read from compiled programs: collectives against a profiled run, FLOPs against formulas; printed plans."""

import collections
import dataclasses
import json
import re

import jax
import pytest
from helpers import fresh_state, host_batch, program, tiny, train_step
from hlo_text import RATES
from jax.profiler import ProfileData
from made_plans import tiny as tiny_8b

from jaxtrain.commands import plan as command
from jaxtrain.config.schema import RunConfig
from jaxtrain.plan import topology
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import collectives, hlo, roofline
from jaxtrain.plan.result import from_json
from jaxtrain.step.batch import place_batch

WHOLE_CHUNKS = {"loss.chunk": 64}  # no padding among a device's 128 tokens
KINDS = re.compile(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def read(run: RunConfig) -> tuple[str, dict[str, collectives.CollectiveOp]]:
    """Return the text of a train step for this machine's CPUs, and its collectives with 4 devices a node."""
    text = train_step(run).as_text() or ""
    return text, collectives.read_collectives(hlo.parse_hlo(text), dataclasses.asdict(run.mesh), gpus_per_node=4)


def assert_flops(run: RunConfig, text: str, found: dict[str, collectives.CollectiveOp]) -> None:
    """Check that the program's FLOPs equal the formula's. On CPUs attention computes all T x T scores, and twice as much
    backward as forward.
    """
    assert program(run).kernel.name == "reference"
    predicted = roofline.predict(hlo.parse_hlo(text), RATES, found)
    assert predicted.flops == pytest.approx(roofline.expected_flops(program(run)), rel=0.01)


def test_planned_launches_are_those_of_a_run(tmp_path):
    """In a trace of 8 devices each collective occurs 8 times as often as in the plan. The plan counts each trip of the loops
    over layers and microbatches.
    """
    run = tiny({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2, **WHOLE_CHUNKS})
    text, found = read(run)
    assert len(found) == sum(bool(KINDS.search(line)) for line in text.splitlines())
    assert {f.axis for f in found.values()} >= {"data", "fsdp", "tensor", "data+fsdp"}
    assert max(len(f.loops) for f in found.values()) == 2
    assert_flops(run, text, found)

    step = train_step(run)
    state, batch = fresh_state(run), place_batch(host_batch(run, 0), program(run).batch, program(run).context)
    state, _ = jax.block_until_ready(step(state, batch))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(step(state, batch))
    (trace,) = tmp_path.rglob("*.xplane.pb")
    seen = collections.Counter(
        event.name for plane in ProfileData.from_file(str(trace)).planes for line in plane.lines for event in line.events
    )
    assert {f.instruction: seen[f.instruction] / 8 for f in found.values()} == {f.instruction: f.count for f in found.values()}


@pytest.mark.parametrize(
    ("machine", "kernel", "policy"),
    [
        ("a100:2", "chunked", "full"),
        pytest.param("h200:2", "pallas", "full", marks=pytest.mark.more),
        pytest.param("b200:2", "cudnn", "none", marks=pytest.mark.more),
    ],
)
def test_a_step_compiles_for_each_generation_with_the_flops_of_the_formula(machine, kernel, policy):
    """Packed documents in cuDNN need Hopper or newer, and the Pallas kernel's WGMMA needs Hopper. For an A100,
    attention.impl=auto chooses a kernel in XLA.
    """
    asked = "attention.impl=" + ("pallas" if kernel == "pallas" else "auto")
    run, on = (
        tiny_8b("data.seq_len=2048", "train.global_batch=2", f"remat.policy={policy}", asked),
        topology.parse_topology(machine),
    )
    compiled = compile_step(run, on)
    assert compiled.program.kernel.name == kernel
    assert ("__cudnn$fmha" in compiled.text) == (kernel == "cudnn")
    assert ("jaxtrain_attention_forward_causal" in compiled.text) == (kernel == "pallas")
    module = hlo.parse_hlo(compiled.text)
    wires = collectives.read_collectives(module, dict(compiled.program.placement.mesh.shape), 2)
    found = roofline.predict(module, RATES, wires)
    assert found.flops == pytest.approx(roofline.expected_flops(compiled.program), rel=0.01)
    assert {"forward", "backward", "optimizer", "loss"} <= {k.op_name.split()[0] for k in found.kernels if k.op_name}
    again = {k.op_name for k in found.kernels if k.kind in ("gemm", "attention") and k.op_name.startswith("recompute")}
    assert bool(again) == (policy != "none")
    assert sum(k.ms for k in found.kernels if k.kind == "gemm") == pytest.approx(found.gemm_ms)


def test_a_plan_is_printed_and_written(monkeypatch, request, tmp_path, capsys):
    monkeypatch.chdir(request.config.rootpath)
    # The command sets this variable; monkeypatch restores it for later tests.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html", "hlo")}
    small = ("model.num_layers=2", "model.vocab_size=1024", "data.seq_len=1024", "train.global_batch=8", "train.grad_accum=1")
    argv = ["--config=configs/llama3_1b.py", *(f"--config.{o}" for o in small), "--topology=h200:8"]
    assert command.main([*argv, *(f"--{name}={path}" for name, path in files.items())]) == 0
    assert "MFU" in capsys.readouterr().out
    tree = json.loads(files["json"].read_text())
    plan = from_json(tree)
    assert plan.topology == "h200:8" and plan.config == "configs/llama3_1b.py" and plan.fits
    assert "model.num_layers=2" in plan.overrides
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>") and "h200:8" in page
    assert files["hlo"].read_text().startswith("HloModule jit_train_step")
    assert tree["memory"]["workspace_gib"] > 0 and tree["memory"]["workspace_by"] == "formula"
    # Other programs depend on this form.
    assert {"topology", "mesh", "fits", "memory", "flops", "collectives", "time", "compile_s"} <= tree.keys()
    assert {"hbm_gib", "usable_gib", "peak_gib", "arguments_gib", "temp_gib", "by_class"} <= tree["memory"].keys()
    assert {"kind", "dtype", "axis", "count", "wire_gib", "exposed_ms", "source"} <= tree["collectives"][0].keys()
    wanted = {"compute_ms", "communication_ms", "exposed_ms", "step_ms", "tokens_per_s_per_device", "mfu_causal", "mfu_full"}
    assert wanted | {"bound_by"} <= tree["time"].keys()
    assert {"per_token_causal", "per_token_full", "hardware_per_step"} <= tree["flops"].keys()
