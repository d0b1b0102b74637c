"""XLA's options: which options a step is compiled with, on which GPU, and the handling of options that a user sets."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from jaxtrain.config import hardware
from jaxtrain.config.schema import ConfigError
from jaxtrain.data import loading
from jaxtrain.plan import topology
from jaxtrain.step import compiler
from jaxtrain.step.program import build_program
from jaxtrain.train.child import error_line


def program(machine: str = "h200:8", **overrides):
    args = [f"--config.{key.replace('__', '.')}={value}" for key, value in {"model__num_layers": 2, **overrides}.items()]
    return build_program(
        loading.load_config(["--config=configs/llama3_1b.py", *args]).run, topology.devices(topology.parse_topology(machine))
    )


def choose(machine: str = "h200:8", **overrides) -> compiler.XlaOptions:
    return compiler.choose_options(
        program(machine, **overrides), compiler.make_card(topology.parse_topology(machine).memory_gib)
    )


def test_a_users_options_stand_beside_ours_or_in_their_place():
    assert choose("h200:8", train__grad_accum=1, mesh__fsdp=4, mesh__seq=2).dropped == ()  # this XLA knows all of ours
    ours = choose(train__grad_accum=1).options
    assert ours["optimization_level"] == "O1" and ours["xla_gpu_enable_triton_gemm"] is False
    mixed = choose(train__grad_accum=1, compiler__options="xla_gpu_enable_triton_gemm=true,xla_gpu_autotune_level=3").options
    assert mixed == ours | {"xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": "3"}
    listed = choose(compiler__options="xla_disable_hlo_passes=dot-merger+rematerialization").options
    assert listed["xla_disable_hlo_passes"] == "dot-merger,rematerialization"
    assert choose(compiler__options=f"{compiler.GRAPHS}=").options[compiler.GRAPHS] == ""


def test_the_scheduler_is_given_what_a_run_may_use():
    """XLA's memory limit is the state plus SLOP percent of the memory beside the state.

    SLOP is the largest percentage at which this limit is within the usable memory.
    """
    made = program(train__grad_accum=1)
    card = compiler.make_card(topology.parse_topology("h200:8").memory_gib)
    held = compiler.local_bytes(compiler.device_arguments(made)) / 2**30
    spare = compiler.XLA_SHARE * card.memory_gib - held
    limit = held + int(str(compiler.choose_options(made, card).options[compiler.SLOP])) / 100 * spare
    assert card.usable_gib - spare / 100 < limit <= card.usable_gib


def test_the_pipeliner_goes_only_where_a_step_begins_with_a_sum_of_activations():
    def off(**overrides):
        return compiler.EARLY in compiler._disabled_passes(program(**overrides))

    accumulated = {"train__grad_accum": 2, "mesh__fsdp": 1}
    assert off(**accumulated, mesh__tensor=8)
    assert not off(**accumulated, mesh__data=8, mesh__tensor=1)
    assert not off(train__grad_accum=1, mesh__fsdp=1, mesh__tensor=8)
    assert not off(train__grad_accum=2, mesh__fsdp=4, mesh__tensor=2)  # a gather of weights needs nothing


def test_two_collectives_at_a_time_where_weights_are_gathered_across_nodes():
    def at_a_time(machine, **overrides):
        return choose(machine, train__global_batch=256, train__grad_accum=1, **overrides).options.get(compiler.IN_FLIGHT)

    assert at_a_time("h200:8x2", mesh__data=1, mesh__fsdp=16) == "2"
    assert at_a_time("h200:8x2", mesh__data=2, mesh__fsdp=8) is None  # weights stay inside the node
    assert at_a_time("h200:8x2", mesh__data=1, mesh__fsdp=16, sharding__zero=1) is None  # they are gathered once a step


def test_a_name_that_xla_does_not_know_is_left_out_and_named():
    chosen = choose(compiler__options="xla_gpu_make_it_fast=true,xla_gpu_autotune_level=3")
    assert chosen.dropped == ("xla_gpu_make_it_fast",)
    assert "xla_gpu_make_it_fast" not in chosen.options and chosen.options["xla_gpu_autotune_level"] == "3"
    (warning,) = chosen.warnings()
    assert "xla_gpu_make_it_fast" in warning


def test_a_value_that_xla_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="xla_gpu_autotune_level=high"):
        choose(compiler__options="xla_gpu_autotune_level=high")


def test_older_and_unknown_gpus_get_the_safe_ones(monkeypatch):
    """An A100 gets all options but optimization_level, which was not tested on it. A GPU outside of the table gets none."""
    ours, older = choose(train__grad_accum=1), choose("a100:8", train__grad_accum=1, data__packing="none")
    assert set(ours.options) - set(older.options) == {"optimization_level"} and "A100" in older.why
    unknown = program(train__grad_accum=1)
    monkeypatch.setattr(hardware, "lookup", lambda kind: None)
    chosen = compiler.choose_options(unknown, compiler.make_card(24.0))
    assert chosen.options == {} and chosen.why


def test_a_run_that_is_traced_goes_without_cuda_graphs(tmp_path):
    """A traced run has CUDA graphs only if the user lists their kernels: traces of graphs lack the names of operations."""
    plain = compiler.XlaOptions({}, "", ())

    def options(chosen: compiler.XlaOptions, gpu: bool = True, traced: bool = True) -> dict[str, str | bool]:
        return dict(compiler.add_run_options(chosen, gpu, 0.0, False, tmp_path, traced).options)

    assert options(plain) == {compiler.GRAPHS: ""} == compiler.remove_run_options(options(plain))
    assert options(plain, traced=False) == options(plain, gpu=False) == {}
    own = dataclasses.replace(plain, options={compiler.GRAPHS: "FUSION"})
    assert options(own) == own.options


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("INTERNAL: [cudnn_frontend] Error: No valid execution plans built.", "LD_PRELOAD"),
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
    plain, file = compiler.XlaOptions({}, "", ()), tmp_path / compiler.AUTOTUNED

    def options(step_s=0.0, repeatable=True):
        return dict(compiler.add_run_options(plain, True, step_s, repeatable, tmp_path).options)

    assert options() == {compiler.DUMP: str(file)}
    file.touch()
    assert options() == {compiler.LOAD: str(file)} and compiler.autotune_path(options()) == file
    own = file.with_name("autotuned_16.txt")  # of a smaller batch
    assert compiler.options_for_size(options(), 16) == {compiler.DUMP: str(own)}
    own.touch()
    assert compiler.options_for_size(options(), 16) == {compiler.LOAD: str(own)}
    assert compiler.options_for_size({"x": True}, 16) == {"x": True}


def test_xla_ends_a_step_after_half_as_long_again_as_the_watchdog_and_says_what_is_pending(tmp_path):
    def options(**asked: str):
        return dict(compiler.add_run_options(compiler.XlaOptions(asked, "", ()), True, 9.0, False, tmp_path).options)

    assert options() == {compiler.TIMEOUT: "14s", compiler.TRACKING: "8"}
    assert options(**{compiler.TRACKING: "0"})[compiler.TRACKING] == "0", "the user's own"
    assert compiler.remove_run_options(options()) == {}
