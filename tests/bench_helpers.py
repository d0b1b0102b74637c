"""What tests of benchmarks share: a case in this process, a measured answer, and the folder that commands run in."""

import json
import os
import sys

import pytest

from jaxtrain.bench import case, measure, suite

SMALL = ("--config=configs/tiny.py", *suite.SMALL)
PEER = [
    *("--config=configs/llama3_1b.py:gpus=1", *suite.SMALL, "--config.model.vocab_size=272", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=8", "--config.train.global_batch=4"),
    *("--config.train.grad_accum=2", "--devices=1", "--steps=2", "--warmup=1", "--peer=torch", "--rounds=2"),
]
ANSWER = {
    "verdict": "ok",
    "step_s": dict.fromkeys(("median", "q1", "q3"), 1.0),
    "memory": {"peak_gib": 40.0},
    "planned": None,
    **dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device"), 10.0),
    **dict.fromkeys(("mfu_causal", "mfu_full", "hfu", "compile_s"), 0.5),
    **dict.fromkeys(("steps", "warmup"), 2),
}


@pytest.fixture(autouse=True)
def at_home(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])  # what the command sets would stay with the tests that follow
    # So would a compile cache. Cases in processes of their own have one, in the folder that their config names.
    monkeypatch.setattr(measure, "set_compile_cache", lambda run: None)


def here(kind, ask, *, log=None, environ=None, limit_s=None):
    """A case in this process."""
    module, _, function = case.CASES[kind].partition(":")
    return {"seconds": 0.1} | getattr(sys.modules[module], function)(json.loads(json.dumps(ask)))
