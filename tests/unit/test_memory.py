"""Too little memory: the message, the settings that would help, and when a step is refused before it runs."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxtrain.config import RunConfig, resolve
from jaxtrain.train import memory

GIB = 2**30
MEMORY = {"parameters": 15.0, "optimizer state": 30.0, "batch": 0.01, "temporaries": 80.5, "peak": 125.51}


def resolved(**section: Any) -> RunConfig:
    """Return a resolved config with these keys of `train`."""
    config, problems = resolve({"train": section})
    assert not problems
    return config


def explained(config: RunConfig, error: Exception) -> str:
    with pytest.raises(memory.OutOfMemory) as caught, memory.out_of_memory_explained(config, MEMORY):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_out_of_memory_is_explained() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")
    said = explained(resolved(global_batch=32, grad_accum=2), error)
    assert "out of memory" in said
    for name, gib in MEMORY.items():
        assert re.search(rf"^  {name} +{memory.size(gib)}$", said, re.MULTILINE)
    hints = said.partition("Settings that help:\n")[2].splitlines()
    assert [hint.split()[0] for hint in hints] == [
        "train.grad_accum",
        "remat.policy=full:",
        "dtypes.m=bf16:",
        "optimizer.offload=moments:",
        "mesh.fsdp",
    ]


def test_only_hints_that_are_left_are_given() -> None:
    small = resolved(global_batch=2, grad_accum=2)
    assert "grad_accum" not in memory.explain_memory(small, MEMORY, "there is")


def test_other_errors_of_the_runtime_stay_as_they_are() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.out_of_memory_explained(RunConfig(), MEMORY):
        raise error


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (None, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 0}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 61 * GIB, "largest_free_block_bytes": 0}, "free memory of GPU 0 is 39.00"),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 50 * GIB}, ""),
        (
            {"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 30 * GIB},
            "the largest free block of GPU 0 is 30.00",
        ),
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
    assert "needs 42.00 GiB beside its state" in str(caught.value) and "36.00 GiB of them by the state" in str(caught.value)
