"""Too little memory: the message, the settings that would help, and when a step is refused before it runs."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxtrain.config.schema import resolve
from jaxtrain.step import memory

GIB = 2**30
MEMORY = {"parameters": 15.0, "optimizer state": 30.0, "batch": 0.01, "temporaries": 80.5, "peak": 125.51}


def test_out_of_memory_is_explained() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")
    config, small = (resolve({"train": {"global_batch": batch, "grad_accum": 2}})[0] for batch in (32, 2))
    with pytest.raises(memory.OutOfMemory) as caught, memory.explain_out_of_memory(config, MEMORY):
        raise error
    said = str(caught.value)
    for name, gib in MEMORY.items():
        assert re.search(rf"^  {name} +{memory.format_gib(gib)}$", said, re.MULTILINE)
    keys = ["train.grad_accum", "remat.policy", "dtypes.m", "dtypes.m", "optimizer.offload", "mesh.fsdp"]
    assert re.findall(r"^  (\w+\.\w+)", said, re.MULTILINE) == keys
    # Only settings that are left are listed.
    assert "grad_accum" not in memory.explain_memory(small, MEMORY, "there is")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, set()),
        ({"mesh": {"stage": 2}, "train": {"grad_accum": 2}}, {"optimizer.offload=moments"}),
        ({"lora": {"rank": 8}}, {"dtypes.m=int8"}),
        ({"model": {"attention_pattern": "ddg"}}, {"remat.every=2"}),
    ],
    ids=["nothing", "stages", "adapters", "delta nets"],
)
def test_a_setting_that_the_run_may_not_have_is_no_hint(settings: dict[str, Any], refused: set[str]) -> None:
    model = {"num_layers": 12, "num_heads": 8, "num_kv_heads": 8} | settings.get("model", {})
    run, problems = resolve(settings | {"model": model})
    assert not problems
    text = memory.explain_memory(run, MEMORY, "there is")
    hints = {"optimizer.offload=moments", "dtypes.m=int8", "remat.every=2"}
    assert {hint for hint in hints if hint in text} == hints - refused


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (None, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 61 * GIB, "largest_free_block_bytes": 0}, "39.00"),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 50 * GIB}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 30 * GIB}, "30.00"),
    ],
)
def test_the_step_is_compared_with_the_free_memory_that_is_left(stats: dict[str, int] | None, said: str) -> None:
    """The step needs 42 GiB beside a state of 36 GiB. It is refused if the largest free block is smaller than 42 GiB. If that
    figure is 0 or missing, all free memory is compared.
    """
    analysis = SimpleNamespace(
        argument_size_in_bytes=36 * GIB,
        output_size_in_bytes=37 * GIB,
        alias_size_in_bytes=35 * GIB,
        temp_size_in_bytes=40 * GIB,
    )
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    device: Any = type("Device", (), {"memory_stats": lambda self: stats, "__str__": lambda self: "GPU 0"})()
    program: Any = SimpleNamespace(batch={})
    if not said:
        memory.check_free_memory(program, compiled, [device])
        return
    with pytest.raises(memory.OutOfMemory, match=said) as caught:
        memory.check_free_memory(program, compiled, [device])
    assert "42.00 GiB" in str(caught.value) and "36.00 GiB" in str(caught.value)
