"""Helpers of the benchmark tests: run a case in this process, a made-up result, and the repository as working directory."""

import importlib
import json
import os

import pytest

from jaxtrain.node import suite, train_step

SMALL = ("--config=configs/tiny.py", *suite.SMALL)
PEER = [
    *("--config=configs/llama3_1b.py:gpus=1", *suite.SMALL, "--config.model.vocab_size=272", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=8", "--config.train.global_batch=4"),
    *("--config.train.grad_accum=2", "--steps=2", "--warmup=1", "--rounds=2"),
]
ANSWER = {
    "verdict": "ok",
    "step_s": dict.fromkeys(("median", "q1", "q3", "min", "max"), 1.0),
    "memory": {"peak_gib": 40.0, "budget_gib": None},
    "planned": None,
    "not_planned": "no plan",
    "loss": {"first": 5.0, "last": 4.0},
    **dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device"), 10.0),
    **dict.fromkeys(("mfu_causal", "mfu_full", "hfu", "compile_s", "data_wait_s", "peak_tflops", "tflops_per_device"), 0.5),
    **dict.fromkeys(("steps", "warmup"), 2),
}


@pytest.fixture(autouse=True)
def at_home(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        # The command sets these variables; monkeypatch restores them for later tests.
        monkeypatch.setenv(name, os.environ[name])
    # A compile cache would stay set too. A case in its own process uses the cache folder of its config.
    monkeypatch.setattr(train_step, "set_compile_cache", lambda run: None)


def run_here(function, request, **_):
    """Run a benchmark's case in this process instead of a child process."""
    module, _, name = function.partition(":")
    return {"seconds": 0.1} | getattr(importlib.import_module(module), name)(json.loads(json.dumps(request)))
