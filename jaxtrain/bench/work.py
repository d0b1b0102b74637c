"""What is timed against its floor, and in which sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtrain.config import Mesh, RunConfig, default_config, resolve


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything. The defaults are those of Llama 3 8B at 8192 tokens."""

    attention: tuple[int, int, int, int, int] = (1, 8192, 32, 8, 128)  # B, T, N, K, H
    loss: tuple[int, int, int] = (8192, 4096, 128256)  # T, D, V
    norm: tuple[int, int] = (16384, 4096)  # T, D
    optimizer: tuple[int, int, int] = (4, 4096, 14336)  # layers, D, F
    gemm: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    # Rows, experts, D, F: 8,192 tokens in a layer of Mixtral 8x7B, each with 2 experts, and of Qwen3 30B A3B, with 8.
    experts: tuple[tuple[int, int, int, int], ...] = ((16384, 8, 4096, 14336), (65536, 128, 2048, 768))
    work: float = 50e12  # FLOPs of a timed program, about
    rounds: int = 200  # of a timed program, at most
    warm_s: float = 0.5
    repeats: int = 7


TINY = Sizes((1, 64, 4, 2, 16), (64, 32, 264), (64, 32), (2, 32, 64), (32, 64), ((64, 4, 32, 64),), 1e6, 2, 0.0, 3)


@dataclasses.dataclass(frozen=True)
class Work:
    """One thing to time."""

    kind: str
    what: str
    flop: float  # of one call
    bytes: float  # that one call must read and write
    prepare: Callable[[], tuple[Callable[..., Any], Any, Any]]  # -> (body, constants, state), as `looped` takes them
    calls: int = 1  # of the kernel in one round of body
    dtype: str = "bf16"


def one_device(cache: str | None = None) -> RunConfig:
    """The default config, on one device. cache: instead of its folder of compiled programs."""
    run, _ = resolve(default_config())
    paths = run.paths if cache is None else dataclasses.replace(run.paths, cache=cache)
    return dataclasses.replace(run, mesh=Mesh(data=1, fsdp=1), paths=paths)
