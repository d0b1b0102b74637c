"""XLA's options: which options a step is compiled with, on which GPU, and the handling of options that a user sets."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import hardware, launch
from jaxtrain.bench.child import error_line
from jaxtrain.config import ConfigError
from jaxtrain.parity import compare
from jaxtrain.plan import topology
from jaxtrain.train import compiler
from jaxtrain.train.program import build
from jaxtrain.validate import validate_step


def program(machine: str = "h200:8", **overrides):
    args = [f"--config.{key.replace('__', '.')}={value}" for key, value in {"model__num_layers": 2, **overrides}.items()]
    return build(launch.load(["--config=configs/llama3_1b.py", *args]).run, topology.devices(topology.parse(machine)))


def choose(machine: str = "h200:8", **overrides) -> compiler.Chosen:
    return compiler.choose(program(machine, **overrides), compiler.card(topology.parse(machine).memory_gib))


def test_a_users_options_stand_beside_ours_or_in_their_place():
    ours = choose(train__grad_accum=1).options
    assert ours["optimization_level"] == "O1" and ours["xla_gpu_enable_triton_gemm"] is False
    mixed = choose(train__grad_accum=1, compiler__options="xla_gpu_enable_triton_gemm=true,xla_gpu_autotune_level=3").options
    assert mixed == ours | {"xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": "3"}
    alone = choose(compiler__defaults=False, compiler__options="xla_disable_hlo_passes=dot-merger+rematerialization")
    assert alone.options == {"xla_disable_hlo_passes": "dot-merger,rematerialization"}
    assert choose(compiler__defaults=False).options == {}


def test_the_scheduler_is_given_what_a_run_may_use():
    """XLA's memory limit is the state plus SLOP percent of the memory beside the state.

    SLOP is the largest percentage at which this limit is within the usable memory.
    """
    made = program(train__grad_accum=1)
    card = compiler.card(topology.parse("h200:8").memory_gib)
    held = compiler.local_bytes(compiler.on_device(made)) / 2**30
    spare = compiler.XLA_SHARE * card.memory_gib - held
    limit = held + int(str(compiler.choose(made, card).options[compiler.SLOP])) / 100 * spare
    assert card.usable_gib - spare / 100 < limit <= card.usable_gib


def test_the_pipeliner_goes_only_where_a_step_begins_with_a_sum_of_activations():
    def off(**overrides):
        return compiler.EARLY in compiler._without(program(**overrides))

    accumulated = {"train__grad_accum": 2, "mesh__fsdp": 1}
    assert off(**accumulated, mesh__tensor=8)
    assert not off(**accumulated, mesh__data=8, mesh__tensor=1)
    assert not off(train__grad_accum=1, mesh__fsdp=1, mesh__tensor=8)
    assert not off(train__grad_accum=2, mesh__fsdp=4, mesh__tensor=2), "a gather of weights needs nothing"


def test_two_collectives_at_a_time_where_weights_are_gathered_across_nodes():
    def at_a_time(machine, **overrides):
        return choose(machine, train__global_batch=256, train__grad_accum=1, **overrides).options.get(compiler.IN_FLIGHT)

    assert at_a_time("h200:8x2", mesh__data=1, mesh__fsdp=16) == "2"
    assert at_a_time("h200:8x2", mesh__data=2, mesh__fsdp=8) is None, "weights stay inside the node"
    assert at_a_time("h200:8x2", mesh__data=1, mesh__fsdp=16, sharding__zero=1) is None, "they are gathered once a step"
    assert at_a_time("h200:8", mesh__fsdp=8) is None


def test_a_users_value_may_be_empty():
    assert choose(compiler__options=f"{compiler.GRAPHS}=").options[compiler.GRAPHS] == ""


def test_a_name_that_xla_does_not_know_is_left_out_and_named():
    chosen = choose(compiler__options="xla_gpu_make_it_fast=true,xla_gpu_autotune_level=3")
    assert chosen.dropped == ("xla_gpu_make_it_fast",)
    assert "xla_gpu_make_it_fast" not in chosen.options and chosen.options["xla_gpu_autotune_level"] == "3"
    (warning,) = chosen.warnings()
    assert "xla_gpu_make_it_fast is left out: jaxlib" in warning


def test_this_xla_knows_all_of_ours():
    assert choose("h200:8", train__grad_accum=1, mesh__fsdp=4, mesh__seq=2).dropped == ()


def test_a_value_that_xla_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="xla_gpu_autotune_level=high.*not a valid"):
        choose(compiler__options="xla_gpu_autotune_level=high")


@pytest.mark.parametrize(
    ("text", "rule"), [("xla_foo", "must be NAME=VALUE"), ("=1", "must be NAME=VALUE"), ("a=1,a=2", "named twice")]
)
def test_what_is_no_list_of_options_is_refused_before_anything_starts(text, rule):
    run = helpers.tiny({"compiler.options": text})
    problems = validate_step(run, hardware.Devices("cpu", "cpu", 1, 8.0, "here"))
    assert [p.key for p in problems] == ["compiler.options"] and rule in problems[0].rule


def test_older_and_unknown_gpus_get_the_safe_ones(monkeypatch):
    """An A100 gets all options but optimization_level, which was not tested on it. A GPU outside of the table gets none."""
    ours, older = choose(train__grad_accum=1), choose("a100:8", train__grad_accum=1, data__packing="none")
    assert set(ours.options) - set(older.options) == {"optimization_level"} and "A100" in older.why
    unknown = program(train__grad_accum=1)
    monkeypatch.setattr(hardware, "lookup", lambda kind: None)
    chosen = compiler.choose(unknown, compiler.card(24.0))
    assert chosen.options == {} and "is not in jaxtrain/hardware.py" in chosen.why


def test_a_run_that_is_traced_goes_without_cuda_graphs(tmp_path):
    """A traced run has CUDA graphs only if the user lists their kernels: traces of graphs lack the names of operations."""
    plain = compiler.Chosen({}, "", ())

    def options(chosen: compiler.Chosen, gpu: bool = True, traced: bool = True) -> dict[str, str | bool]:
        return dict(compiler.for_run(chosen, gpu, 0.0, False, tmp_path, traced).options)

    assert options(plain) == {compiler.GRAPHS: ""} == compiler.remove_run_options(options(plain)), "the receipt names it"
    assert options(plain, traced=False) == options(plain, gpu=False) == {}
    own = dataclasses.replace(plain, options={compiler.GRAPHS: "FUSION"})
    assert options(own) == own.options


def test_a_bench_that_is_traced_goes_without_cuda_graphs(monkeypatch):
    run = launch.load(["--config=configs/llama3_1b.py", "--config.model.num_layers=2"]).run
    monkeypatch.setattr(compiler, "card_of", lambda *_: compiler.card(140.0))
    monkeypatch.setattr(compare, "compile_to_fit", lambda run, program, *_: (run, program, None))
    on_node = topology.devices(topology.parse("h200:8"))
    with_graphs, without = (compare.compile_step(run, on_node, traced=traced)[3] for traced in (False, True))
    assert without == with_graphs | {compiler.GRAPHS: ""} != with_graphs


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("INTERNAL: [cudnn_frontend] Error: No valid execution plans built.", "LD_PRELOAD"),
        ("INTERNAL: libdevice not found at ./libdevice.10.bc", "CUDA_ROOT"),
        ("FAILED_PRECONDITION: No PTX compilation provider is available.\n - ptxas_path: none", "CUDA_ROOT"),
        ("INTERNAL: something else", ""),
    ],
)
def test_a_missing_part_of_cuda_is_named_with_a_remedy(text, remedy):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(text)

    lowered = SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=fail))
    step = SimpleNamespace(train_step=lowered, state=None, batch=None, offload=False)
    with pytest.raises(compiler.KernelNotBuilt if remedy else jax.errors.JaxRuntimeError) as caught:
        compiler.compile_train(cast(Any, step), {})
    assert remedy in str(caught.value) and remedy in error_line(jax.errors.JaxRuntimeError(text))


def test_a_repeatable_run_keeps_what_xla_chose_and_takes_it_again(tmp_path):
    plain, file = compiler.Chosen({}, "", ()), tmp_path / compiler.AUTOTUNED

    def options(step_s=0.0, repeatable=True):
        return dict(compiler.for_run(plain, True, step_s, repeatable, tmp_path).options)

    assert options() == {compiler.DUMP: str(file)}
    file.touch()
    assert options() == {compiler.LOAD: str(file)} and compiler.autotuned(options()) == file
    assert options(step_s=9.0, repeatable=False) == {compiler.TIMEOUT: "14s"}, "half as long again, and up"


def test_an_empty_list_leaves_no_kernel_for_cuda_graphs(tmp_path):
    """With compiler.GRAPHS empty, XLA's dump of its options for a program for an H200 lists no kernels for CUDA graphs."""
    (device,) = topology.devices(topology.parse("h200:1"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SingleDeviceSharding(device))
    kinds = {}
    for name, given in (("default", {}), ("none", {compiler.GRAPHS: ""})):
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=given | {"xla_dump_to": str(tmp_path / name)})
        (config,) = (tmp_path / name).glob("*.config.pbtxt")
        kinds[name] = re.findall(rf"{compiler.GRAPHS}: (\w+)", config.read_text())
    assert "FUSION" in kinds["default"] and kinds["none"] == []


def test_a_cpu_has_only_the_users():
    run = helpers.tiny({"compiler.options": "xla_cpu_enable_fast_math=true"})
    here = helpers.program(run)
    assert compiler.choose(here, None).options == {"xla_cpu_enable_fast_math": True}
    assert compiler.choose(helpers.program(helpers.tiny()), None).options == {}
