"""Benchmarks against PyTorch: the settings passed to its script, and the comparison of results."""

import contextlib
import importlib.util
import json
import sys
import types
from unittest.mock import MagicMock

import pytest
from bench_helpers import ANSWER, PEER, at_home  # noqa: F401

from benchmarks import peer_torch
from jaxtrain import launch
from jaxtrain.bench import train_step


def test_a_peer_that_cannot_be(capsys):
    """Two mistakes are reported together: a missing interpreter, and a setting that transformers' Llama does not support."""
    more = ["--config.model.qk_norm=true", "--python=nowhere/python"]
    assert peer_torch.main([*PEER, *more]) == 2
    said = capsys.readouterr().err
    assert "--python = 'nowhere/python': no such program" in said
    assert "model.qk_norm = True: transformers' Llama does not support it" in said


EXAMPLE = {"verdict": "ok", "spec": {"parameters": 1}, "losses": [5.0, 4.0]}


def test_other_work_is_not_compared(monkeypatch):
    monkeypatch.setattr(peer_torch, "run_peer", lambda *_: {"verdict": "ok", "losses": [5.0, 4.01]})
    found = peer_torch.compare_losses(EXAMPLE, "python")
    assert found["verdict"] == "failed" and found["off"] == pytest.approx(0.0025)


def test_losses_are_compared_on_the_platform_that_is_asked_for(monkeypatch, tmp_path):
    """PyTorch trains the example of `export_small`. If there is no example, PyTorch does not start."""
    asked = []

    def run_peer(python, spec, log, limit_s):
        asked.append((python, spec["platform"], spec["settings"], spec["parameters"], log, limit_s))
        return {"verdict": "ok", "losses": [5.0, 4.0]}

    monkeypatch.setattr(peer_torch, "run_peer", run_peer)
    found = peer_torch.compare_losses(EXAMPLE, "python", tmp_path / "log", 30.0, platform="cpu")
    losses = EXAMPLE["losses"]
    assert found == {"verdict": "ok", "ours": losses, "theirs": losses, "off": 0.0, "allowed": peer_torch.SAME}
    late = {"verdict": "out of time", "why": "not done after 1 s"}
    assert peer_torch.compare_losses(late, "python") == late
    plain = {"attention": "sdpa", "compile": "none", "checkpoint": False}
    assert asked == [("python", "cpu", [plain], 1, tmp_path / "log", 30.0)]


@pytest.mark.parametrize(
    "text", ["cudnn", "layers,cudnn", "eager,none", "flash,layers,again", "sdpa,none,checkpoint;", ";", ""]
)
def test_settings_that_cannot_be(text, capsys):
    assert [p.key for p in peer_torch.COMMAND.parse([f"--settings={text}"]).problems] == ["--settings"]
    assert peer_torch.main([*PEER, f"--settings={text}"]) == 2 and f"--settings = {text!r}:" in capsys.readouterr().err


def test_settings_of_a_gpu_are_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(peer_torch, "interpreter", lambda *_: [])
    assert peer_torch.main([*PEER, "--settings=sdpa,none;flash,layers"]) == 2
    assert "--settings = 'sdpa,none;flash,layers':" in capsys.readouterr().err


def test_settings_are_read_in_their_order():
    found = peer_torch.read_settings("cudnn,layers ; flash,model ; sdpa,none,checkpoint")
    assert [tuple(s.values()) for s in found] == [("cudnn", "layers", False), ("flash", "model", False), ("sdpa", "none", True)]
    assert all(list(s) == ["attention", "compile", "checkpoint"] for s in found)


SLOW, FAST = ({"attention": "sdpa", "compile": c, "checkpoint": False} for c in ("none", "layers"))


@pytest.mark.parametrize(
    ("more", "limits", "given"),
    [
        (["--limit=50", "--tune=7"], [50, 30, 10, 57, 50], []),
        (["--limit=25"], [25, 5, 1, 125, 25], []),
        (["--limit=50", "--tune=7", "--settings=sdpa,none;sdpa,layers"], [50, 30, 10, 50, 50], [SLOW, FAST]),
        (["--tune=7"], [None] * 5, []),
    ],
)
def test_limits_of_the_comparison_and_of_a_search(more, limits, given, tmp_path, monkeypatch):
    """The comparison and both exports share --limit; each takes 20 s here. A search adds --tune to its measurement's limit."""
    seconds, asked, seen = [0.0], [], []

    def run_case(function, request, log=None, limit_s=None, **_):
        if function == train_step.CASE:
            return dict(ANSWER)
        seconds[0] += 20
        seen.append(limit_s)
        if function == peer_torch.EXPORT:
            return {"verdict": "ok", "spec": {}, "losses": [5.0] * 3}
        asked.append((request["settings"], request["tune_s"]))
        answer = {"verdict": "ok", "torch": "2", "transformers": "5", "device": "cpu", "settings": FAST, "tried": []}
        return answer | {"step_times": [0.5] * 2, "losses": [5.0] * 3, "reserved_gib": None}

    monkeypatch.setattr(peer_torch, "run_case", run_case)
    monkeypatch.setattr(peer_torch, "interpreter", lambda *_: [])
    monkeypatch.setattr(peer_torch, "time", types.SimpleNamespace(monotonic=lambda: seconds[0]))
    assert peer_torch.main([*PEER, *more, f"--json={tmp_path}/peer.json"]) == 0
    assert seen == limits
    tune_s = 7.0 if "--tune=7" in more else 100.0
    assert asked[1:] == [(given, tune_s), ([FAST], tune_s)]  # the first is the comparison of losses
    tree = json.loads((tmp_path / "peer.json").read_text())
    assert tree["given"] == given and tree["turns"][3]["settings"] == FAST


def test_a_search_and_given_settings_are_described_differently():
    turn = {"torch": "2", "transformers": "5", "settings": FAST, "tried": [], "verdict": "ok"}
    turns, ratio = [turn | {"who": "torch"}], {"ratio": 1.0, "least": 1.0, "most": 1.0}
    assert peer_torch.describe(turns, ratio, []) != peer_torch.describe(turns, ratio, [FAST])


@pytest.fixture
def step(monkeypatch):
    """Return benchmarks/peer_torch_step.py as a module, with a fake of torch."""
    fake = MagicMock(__version__="0")
    fake.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    nested = ("_dynamo", "nn", "nn.functional", "nn.attention", "utils", "utils.checkpoint")
    for name in ("torch", *(f"torch.{n}" for n in nested), "transformers"):
        monkeypatch.setitem(sys.modules, name, fake)
    found = importlib.util.spec_from_file_location("peer_torch_step", peer_torch.SCRIPT)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


GPU = types.SimpleNamespace(type="cuda")


def choose(step, monkeypatch, outcomes, settings, tune_s):
    """Return (chosen settings, (settings, steps) of each step that was built, `tried`).

    outcomes: settings -> step time in seconds, or type of error.
    """
    built = []

    def measure(spec, device, batch, how, warmup, steps):
        built.append((tuple(how.values()), warmup + steps))
        outcome = outcomes.get(built[-1][0], 1.0)
        if not isinstance(outcome, float):
            raise outcome("it fails")
        return {"settings": how, "step_times": [outcome] * steps}

    monkeypatch.setattr(step, "measure", measure)
    answer = step.choose({"settings": settings, "tune_s": tune_s, "warmup": 5, "steps": 20}, GPU, ())
    return tuple(answer["settings"].values()), built, answer["tried"]


CUDNN, FLASH, AGAIN = ("cudnn", "layers", False), ("flash", "layers", False), ("flash", "layers", True)


def test_the_first_given_setting_that_works_is_timed_in_its_trial(step, monkeypatch):
    """Nothing is compiled twice, and nothing that was not given is tried."""
    given = peer_torch.read_settings("cudnn,layers;flash,layers;flash,layers,checkpoint")
    memory = step.torch.OutOfMemoryError
    assert choose(step, monkeypatch, {}, given, 100.0)[:2] == (CUDNN, [(CUDNN, 25)])
    outcomes = {CUDNN: RuntimeError, FLASH: memory}
    chosen, built, tried = choose(step, monkeypatch, outcomes, given, 0.0)
    assert chosen == AGAIN and built == [(CUDNN, 25), (FLASH, 25), (AGAIN, 25)]
    assert [t["step_s"] for t in tried] == [None, None, 1.0]
    with pytest.raises(SystemExit):
        choose(step, monkeypatch, {CUDNN: memory}, given[:1], 0.0)


def test_a_search_times_the_fastest_setting_again(step, monkeypatch):
    """A search takes 2 + 3 steps of each setting, and again with checkpointing if memory runs out, then all of the fastest."""
    outcomes = {CUDNN: step.torch.OutOfMemoryError, ("cudnn", "layers", True): 2.0, ("flash", "model", False): 0.5}
    chosen, built, tried = choose(step, monkeypatch, outcomes, [], 100.0)
    assert chosen == ("flash", "model", False) and built[-1] == (chosen, 25)
    assert len(built) == 6 and all(steps == 5 for _, steps in built[:-1]) and len(tried) == 5


def test_without_time_for_a_search_the_first_setting_that_works_is_timed(step, monkeypatch):
    chosen, built, tried = choose(step, monkeypatch, {CUDNN: RuntimeError}, [], 0.0)
    assert chosen == FLASH and built == [(CUDNN, 25), (FLASH, 25)]
    assert [t["step_s"] for t in tried] == [None, 1.0, None, None]


def test_the_kernel_of_attention_on_each_device(step):
    """The comparison of losses in float32 runs with "sdpa" on a GPU, where cuDNN and flash attention take no float32."""
    for device, attention in ((GPU, "sdpa"), (types.SimpleNamespace(type="cpu"), "cudnn")):
        assert isinstance(step.attention_kernel(attention, device), contextlib.nullcontext)
    step.attention_kernel("cudnn", GPU)
    step.sdpa_kernel.assert_called_once_with([step.BACKENDS["cudnn"]])
    with pytest.raises(KeyError):
        step.attention_kernel("eager", GPU)


def test_the_ratio_of_speeds():
    """`ratio` is jaxtrain's median speed over PyTorch's. `least` and `most` are ratios of single rounds."""
    speeds = (("jaxtrain", 10.0), ("torch", 4.0), ("jaxtrain", 12.0), ("torch", 6.0), ("jaxtrain", 30.0))
    turns = [{"who": who, "verdict": "ok", "tokens_per_s": speed} for who, speed in speeds]
    assert peer_torch.compare_speeds(turns) == {"ratio": 12.0 / 5.0, "least": 2.0, "most": 2.5, "rounds": 2}
    assert peer_torch.compare_speeds(turns[:1]) is None


def test_the_peers_answer_in_our_terms():
    """A step of 128 tokens takes half a second. Three losses with two timed steps mean one warm-up step."""
    run = launch.load([argv for argv in PEER if argv.startswith("--config")]).run
    answer = {"verdict": "ok", "device": "cpu", "step_times": [0.5, 0.5], "losses": [5.0, 4.5, 4.0], "reserved_gib": 2.0}
    found = peer_torch.as_our_answer(answer | {"settings": {"checkpoint": False}}, run)
    assert found["tokens_per_s"] == found["tokens_per_s_per_device"] == 4 * 32 / 0.5
    assert (found["steps"], found["warmup"], found["loss"]) == (2, 1, {"first": 5.0, "last": 4.0})
    assert found["memory"]["peak_gib"] == 2.0 and found["hfu"] == found["mfu_causal"]


def test_what_the_peer_cannot_import():
    """PyTorch's script imports nothing of jaxtrain, so that it runs where jaxtrain is not installed."""
    assert "jaxtrain" not in [
        line.split()[1].split(".")[0]
        for line in peer_torch.SCRIPT.read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]


def test_the_peers_mfu_is_of_our_peak():
    """The MFU is relative to the bfloat16 peak, as in jaxtrain's own results."""
    run = launch.load([*(argv for argv in PEER if argv.startswith("--config")), "--config.precision=bf16"]).run
    answer = {"verdict": "ok", "device": "NVIDIA H200", "step_times": [1.0], "losses": [1.0, 1.0], "reserved_gib": 1.0}
    found = peer_torch.as_our_answer(answer | {"settings": {"checkpoint": False}}, run)
    assert found["peak_tflops"] == train_step.peak_tflops(run, "NVIDIA H200") == pytest.approx(989.4, rel=1e-3)
