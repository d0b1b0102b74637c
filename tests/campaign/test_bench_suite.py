"""The suite of a node, the kernels it times, and the checks it makes: in tiny shapes on CPU devices, and on described GPUs."""

import contextlib
import dataclasses
import io
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bench_helpers import ANSWER, at_home, here  # noqa: F401
from helpers import few
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain import hardware, launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import check, experts, kernels, measure, ranks, report, suite
from jaxtrain.kernels import attention
from jaxtrain.parity.__main__ import main as parity_main
from jaxtrain.plan import calibrate, rates
from jaxtrain.preflight.check import FAULT, Check
from jaxtrain.validate import validate_step

H200 = hardware.lookup("NVIDIA H200")


def program_here(command, log, *, environ=None, limit_s=None):
    """Parity in this process, with its exit code and what it prints; and training as others test it, reduced to its files."""
    if command[2] == "jaxtrain.main":
        assert not launch.load(command[3:], {"workdir": ""}).problems
        (workdir,) = [Path(arg.partition("=")[2]) for arg in command if arg.startswith("--workdir=")]
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text('{"kind": "train", "loss": 3.0}\n{"kind": "eval", "loss": 2.5}\n')
        return 0, "trained"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = parity_main(command[3:])
    return code, said.getvalue()


# ---- kernels


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_kernels_run(kind, monkeypatch):
    monkeypatch.setattr(kernels, "TINY", dataclasses.replace(kernels.TINY, repeats=2, gemm=(32,)))
    monkeypatch.setattr(experts, "TIMED", ("uneven",))
    found = kernels.measure({"kind": kind, "limit_s": None})["rows"]
    timed = [r for r in found if r["verdict"] == "ok"]
    assert timed and not [r for r in found if r["verdict"] not in ("ok", "not timed")]
    assert all(r["seconds_a_call"] > 0 and r["gb_s"] > 0 and r["floor_s"] is None for r in timed)
    if kind == "attention":
        forward, both = (next(r for r in timed if r["kind"] == f"attention {k}") for k in ("forward", "forward+backward"))
        assert forward["flop"] == 4 * 64 * 64 * 4 * 16 / 2 and both["flop"] == 3.5 * forward["flop"]
        assert any("cudnn" in r["what"] and "NVIDIA" in r["why"] for r in found)
    if kind == "gemm":
        assert timed[0]["flop"] == 2 * 32**3 and timed[0]["bytes"] == 3 * 2 * 32**2
    if kind == "optimizer":
        assert timed[0]["bytes"] >= 2 * 32 * 64 * 7 * 4
    if kind == "experts":
        assert [r["what"].rpartition(", ")[2] for r in timed] == ["dense", "4 experts uneven"] * 3
        assert {r["flop"] for r in timed} == {2 * 64 * 32 * 64}
        # Weights of the experts that have rows are read; a gradient is written for all.
        assert [r["bytes"] for r in timed] == [2 * (64 * 96 + n * 32 * 64) for n in (1, 3, 1, 3, 1, 4)]


def test_products_with_one_array_stay_apart():
    """Eight GEMMs of a round are eight, not one that is eight times as wide."""
    sizes = dataclasses.replace(kernels.TINY, gemm=(32,))
    work = next(w for w in kernels.gemm(jax.devices()[0], sizes) if isinstance(w, kernels.Work))
    body, constants, state = work.prepare()
    text = calibrate.looped(body, 2).lower(constants, state).compile().as_text()
    assert work.calls == 8 and len(re.findall(r"= \S+\[32,32\]\S* dot\(", text)) >= 8 and "[256,32]" not in text


def test_kernels_end_at_their_limit():
    found = kernels.measure({"kind": "gemm", "limit_s": 1e-9})["rows"]
    assert {r["why"] for r in found if r["kind"] == "gemm bf16"} == {"no time was left"}


def test_floors_are_those_of_the_data_sheet():
    def work(flop, moved, dtype="bf16"):
        return kernels.Work("k", "w", flop, moved, lambda: (lambda c, x: x + c, jnp.ones(()), jnp.ones(())), 1, dtype)

    assert H200
    row = kernels.time_one(work(989.4e12, 1.0), kernels.TINY, H200)
    assert row["floor_s"] == pytest.approx(1.0) and row["of_floor"] == pytest.approx(1 / row["seconds_a_call"])
    assert kernels.time_one(work(1978.9e12, 1.0, "fp8"), kernels.TINY, H200)["floor_s"] == pytest.approx(1.0)
    assert kernels.time_one(work(1.0, 9.6e12), kernels.TINY, H200)["floor_s"] == pytest.approx(2.0)


def test_a_kernel_that_fails_is_a_row(capsys, monkeypatch, tmp_path):
    def broken():
        raise ValueError("no such luck\nand much more")

    row = kernels.time_one(kernels.Work("k", "w", 1.0, 1.0, broken), kernels.TINY, None)
    assert row["verdict"] == "failed" and kernels.row(row)[-1] == "failed: ValueError: no such luck"
    monkeypatch.setattr(kernels, "apart", lambda kind, ask, log: {"verdict": "ok", "rows": [row], "seconds": 1.0})
    out = tmp_path / "kernels"
    assert command.main(["--kernels=norm", f"--out={out}"]) == 1
    assert json.loads((out / "receipt.json").read_text())["reason"] == "a kernel failed"
    assert "no such luck" in capsys.readouterr().out


# ---- checks


def test_attention_bounds_notice_a_wrong_mask():
    """They hold for a bfloat16 kernel, and are broken where the window is off by one."""
    from jaxtrain.kernels.attention import chunked

    shape = (64, 4, 2, 16, 20, True)
    assert check.attention_case(shape, "chunked")["ok"]
    right = chunked.visible
    try:
        chunked.visible = lambda rows, spec: right(rows, spec.__class__(**{**vars(spec), "window": spec.window + 1}))
        wrong = check.attention_case(shape, "chunked")
    finally:
        chunked.visible = right
    assert not wrong["ok"]
    assert min(wrong[f"{x}_ratio"] for x in ("o", "dq", "dk", "dv")) > 1


def test_ranks_on_one_device_communicate_as_in_shard_map():
    """Every collective, among all ranks and within groups, forward and backward: the same bits as on four devices."""
    groups = [[0, 2], [3, 1]]

    def rank(x):
        def body(x):
            me = jax.lax.axis_index("seq")
            x = jax.lax.ppermute(x * (1 + me), "seq", [(0, 3), (3, 1), (1, 0)])  # nobody sends to rank 2
            gathered = jax.jit(lambda x: jax.lax.all_gather(x, "seq", axis=1, tiled=True, axis_index_groups=groups))(x)
            x = gathered + jnp.sum(jax.lax.all_gather(x, "seq"), axis=0)[:, :1]
            x = jax.lax.all_to_all(x, "seq", split_axis=0, concat_axis=1, tiled=True, axis_index_groups=groups)
            return jax.lax.psum_scatter(x.reshape(4, -1), "seq")

        y, back = jax.vjp(body, x)
        return y, *back(jnp.cos(y))

    x = jax.random.normal(jax.random.key(0), (16, 6))
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("seq",))
    spec = jax.P("seq")
    want = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))(x)
    got = jax.jit(lambda x: ranks.run(rank, "seq", [(part,) for part in jnp.split(x, 4)]))(x)
    for mine, theirs in zip(zip(*got, strict=True), want, strict=True):
        assert jnp.array_equal(jnp.concatenate(mine), theirs) and jnp.any(theirs != 0)
    with pytest.raises(NameError, match="unbound axis name: seq"):
        ranks.run(lambda x: jax.lax.pmax(x, "seq"), "seq", [(x,), (x,)])


def test_sharded_sequences_are_checked_by_cudnn_too():
    """Every row of the check is lowered for a GPU, where each of four ranks calls cuDNN once per block."""
    for how, T, N, K, H, window, packed in check.SPLIT_SHAPES:
        spec = attention.Spec(H, "bf16", packed, 32 if packed else 1, window)
        segments, positions = (jnp.asarray(x) for x in check.documents(T, packed, seed=0))
        both = check.by_ranks(how, spec, "cudnn", (N, K), attention.Rows(segments, positions, segments, positions))
        q, kv = (jax.ShapeDtypeStruct((3, T, heads, H), jnp.bfloat16) for heads in (N, K))
        text = jax.jit(both).trace(q, kv, kv, q).lower(lowering_platforms=("cuda",)).as_text()
        blocks = 1 if how == "ulysses" or window else 2 + check.RANKS - 1  # on the diagonal, behind it, other ranks
        assert text.count("@__cudnn$fmhaSoftmax(") == blocks * check.RANKS, (how, window, packed)
        assert text.count("@__cudnn$fmhaSoftmaxBackward(") >= blocks * check.RANKS, (how, window, packed)


def small(case):
    """A row of the check with a 64th of the tokens and an eighth of the query heads, for a CPU."""
    how, T, N, K, _, window, packed = case
    return how, T // 64, N // 8 * 2, max(1, K // 4), 16, -(-window // 64), packed


SMALL_SPLIT = [(kernel, *small(case)) for kernel in ("chunked", "pallas") for case in check.SPLIT_SHAPES]


@pytest.mark.parametrize("case", few(SMALL_SPLIT, *(SMALL_SPLIT[i] for i in (0, 2, 5, 9, 18))), ids=str)
def test_sharded_sequences_are_within_their_bounds(case):
    kernel, how, *shape = case
    found = check.attempt(shape, kernel, how)
    assert found["ok"], found


def test_loads_of_experts():
    assert experts.loads("even", 14, 4) == [4, 4, 3, 3]
    assert experts.loads("uneven", 14, 4) == [7, 4, 3, 0]
    assert experts.loads("one has all", 14, 4) == [0, 14, 0, 0]
    assert experts.loads("some nobody's", 14, 4) == [5, 3, 2, 0]
    for shape in (*experts.SHAPES, *experts.SMOKE_SHAPES, *kernels.Sizes().experts):
        assert all(sum(experts.loads(how, *shape[:2])) == shape[0] for how in experts.LOADS[:3])


@pytest.mark.parametrize("fault", ["", "a border", "nobody's rows", "a rounding"])
def test_bounds_of_experts_notice_a_fault(fault, monkeypatch):
    """They hold for the kernels. They are broken where one row goes to the next expert, where rows that are nobody's are not
    left out, and where a sum is rounded once more."""
    right = experts.product

    def wrong(which, a, b, sizes_E, out, precision):
        if fault == "a border":
            sizes_E = sizes_E.at[0].add(-1).at[1].add(1)
        if fault == "nobody's rows":
            sizes_E = sizes_E.at[-1].add(a.shape[0] - sizes_E.sum())
        y = right(which, a, b, sizes_E, out, precision)
        return y.astype(jnp.bfloat16).astype(out) if fault == "a rounding" else y

    experts._compiled.cache_clear()
    monkeypatch.setattr(experts, "product", wrong)
    found = experts.case((24, 4, 40, 24), "some nobody's", "f32")
    experts._compiled.cache_clear()
    assert found["ok"] == (not fault)
    if fault:
        assert not [which for which in experts.PRODUCTS if found[f"{which}_ratio"] <= 1]
    assert experts.row(found)[-1] == ("WRONG" if fault else "ok") and len(experts.row(found)) == len(experts.HEADINGS)


def test_products_of_experts_that_fail_or_come_too_late(monkeypatch):
    def case(shape, how, dtype):
        if dtype == "f32":
            raise NotImplementedError("no such luck\nand much more")
        return {"ok": True}

    monkeypatch.setattr(experts, "case", case)
    monkeypatch.setattr(experts, "start", lambda *_: [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])
    found = experts.cases({"limit_s": None})
    half = len(experts.SHAPES) * len(experts.LOADS)
    assert (found["right"], found["wrong"], found["left_out"], found["verdict"]) == (half, half, 0, "failed")
    assert experts.row(found["rows"][-1])[-1] == "WRONG: NotImplementedError: no such luck"
    late = experts.cases({"limit_s": 1e-9})
    assert (late["left_out"], late["verdict"], late["why"]) == (2 * half, "failed", "no kernel could be checked")


def test_a_kernel_that_breaks_takes_nothing_from_the_others(monkeypatch):
    """On a described GPU: cuDNN's shapes come first, Pallas' own last; what raises is a row that is wrong, and is told."""
    tried, kept = [], []

    def attention_case(shape, kernel, how="", dtype="bf16", softcap=0.0):
        tried.append((kernel, how, dtype, softcap))
        if kernel == "pallas":
            raise NotImplementedError("no such luck\nand much more")
        if how:
            raise attention.Unsupported("not this one")
        return {"kernel": kernel, "ok": True}

    monkeypatch.setattr(check, "attention_case", attention_case)
    monkeypatch.setattr(check, "start", lambda *_: [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])
    monkeypatch.setattr(check, "keep", lambda ask, answer: kept.append(json.loads(json.dumps(answer))))
    found = check.attention_cases({"limit_s": None})
    plain, split = len(check.SHAPES), len(check.SPLIT_SHAPES)
    assert [kernel for kernel, *_ in tried[: plain + split]] == ["cudnn"] * (plain + split)
    assert tried[-2:] == [("pallas", "", dtype, cap) for dtype, cap in check.PALLAS_ONLY]
    assert (found["right"], found["wrong"], found["verdict"]) == (plain, plain + split + 2, "failed")
    assert len(kept) == len(tried) and {k["verdict"] for k in kept} == {"out of time"} and kept[0]["right"] == 1
    assert check.row(found["rows"][-1])[-1] == "WRONG: NotImplementedError: no such luck"


@pytest.mark.parametrize(
    ("answer", "want", "said"),
    [
        (
            {"verdict": "ok", "right": 9, "wrong": 0, "left_out": 2},
            "ok",
            "9 shapes within their bounds; for 2 there was no time",
        ),
        (
            {"verdict": "out of time", "why": "not done", "right": 9, "wrong": 0},
            "off",
            "9 shapes within their bounds; not done",
        ),
        ({"verdict": "out of time", "why": "not done", "right": 9, "wrong": 1}, "FAILED", "1 of 10 shapes are beyond"),
        ({"verdict": "out of time", "why": "not done"}, "FAILED", "not done"),
        ({"verdict": "failed", "why": "no kernel could be checked", "right": 0, "wrong": 0}, "FAILED", "no kernel could be"),
    ],
)
def test_what_checked_kernels_come_to(answer, want, said, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "apart", lambda *_, **__: answer)
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_kernels(node, 60.0)
    assert found.verdict == want and said in found.found


def test_a_node_with_a_fault_is_not_well(tmp_path, monkeypatch):
    fault = Check("ECC", FAULT, "none", "GPU5: 2")
    seen = types.SimpleNamespace(gpus=types.SimpleNamespace(absent=""))
    monkeypatch.setattr(suite.inspection, "look", lambda *_: (seen, [fault]))
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_preflight(node, 20.0)
    assert (found.verdict, found.found) == ("FAILED", "wrong: ECC (GPU5: 2)")
    assert found.data[0]["seen"] == "GPU5: 2" and any("| ECC | FAULT |" in line for line in found.lines)


# ---- the suite


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Programs that several cases of this file compile are compiled once."""
    limits = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    names = ("jax_compilation_cache_dir", *limits)
    before = {name: getattr(jax.config, name) for name in names}
    folder = str(tmp_path_factory.mktemp("cache"))
    for name, value in zip(names, (folder, 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # other tests of this process keep nothing on disk


@pytest.mark.more
def test_a_suite_in_tiny_form(tmp_path, monkeypatch, capsys, kept_programs):
    """All parts on 8 CPU devices, in this process."""
    monkeypatch.setattr(suite, "apart", here)
    monkeypatch.setattr(suite, "run_program", program_here)
    monkeypatch.setattr(check, "SMOKE_SHAPES", check.SMOKE_SHAPES[:1])
    monkeypatch.setattr(check, "SMOKE_SPLIT_SHAPES", check.SMOKE_SPLIT_SHAPES[-1:])
    monkeypatch.setattr(suite, "FEW", "one,fsdp2xtensor2")
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "all is well" in printed and "At most 5:00" in printed
    tree = json.loads((out / "results.json").read_text())
    verdicts = {name: part["verdict"] for name, part in tree["parts"].items()}
    assert (
        verdicts.pop("rates") == "left out"
        and {*verdicts.values()} == {"ok"}
        and verdicts.keys() == suite.PARTS.keys() - {"rates"}
    )
    assert tree["parts"]["parity"]["data"]["f32"]["agrees"] and tree["parts"]["kernels"]["data"]["right"] == 2
    assert tree["parts"]["configs"]["data"]["tiny"]["devices"]["count"] == 8
    assert "came back bit for bit" in tree["parts"]["checkpoint"]["found"] and not (out / "checkpoint").exists()
    assert len(tree["parts"]["connections"]["data"]) == 2
    assert tree["parts"]["run"]["found"].startswith("trained, evaluated (loss 2.500)")
    assert {"results.md", "results.json", "receipt.json", "run"} <= {p.name for p in out.iterdir()}
    assert out.with_suffix(".tar.gz").exists()
    page = (out / "results.md").read_text()
    assert "**all is well**" in page and page.index("## Parts") < page.index("## Preflight") < page.index("## Checkpoint")


def test_a_suite_names_what_failed(tmp_path, monkeypatch, capsys):
    def fail(node, limit_s):
        """Fails."""
        return suite.Outcome("FAILED", "one layout DIFFERS")

    monkeypatch.setattr(suite, "PARTS", suite.PARTS | {"parity": (fail, 60.0)})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}", "--parts=preflight,parity"]) == 1
    assert "NOT WELL: parity (one layout DIFFERS)" in capsys.readouterr().out
    assert json.loads((out / "receipt.json").read_text())["reason"] == "failed: parity"


def test_a_part_that_breaks_is_one_that_failed(tmp_path, monkeypatch, capsys):
    def broken(node, limit_s):
        """Breaks."""
        raise OSError("no such luck")

    monkeypatch.setattr(suite, "PARTS", {"rates": (broken, 60.0), "preflight": suite.PARTS["preflight"]})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 1
    found = json.loads((out / "results.json").read_text())["parts"]
    assert found["rates"]["found"].startswith("OSError: no such luck") and found["preflight"]["verdict"] == "ok"
    assert "Traceback" in (out / "logs" / "rates_error.txt").read_text()


def test_a_cpu_is_looked_at_too(tmp_path):
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_preflight(node, 20.0)
    assert found.verdict == "ok" and "no NVIDIA GPU" in found.found
    assert {"/dev/shm", "clock"} <= {c["name"] for c in found.data}


@pytest.mark.parametrize(
    ("verdicts", "want", "said"),
    [
        (("ok", "out of memory", "ok", "out of memory"), "ok", "tokens/s a device"),
        (("ok", "ok", "ok", "out of time"), "off", "llama3_70b:gpus=8: so it is"),
        (("ok", "failed", "ok", "ok"), "FAILED", "llama2_7b:gpus=8: so it is"),
        (("out of memory",) * 4, "FAILED", "no shipped config was measured"),
    ],
)
def test_what_shipped_configs_come_to(verdicts, want, said, tmp_path, monkeypatch):
    """On a described node: what does not fit is no fault, what fails is one, and each gets its share of the time."""
    answers, shares = iter(verdicts), []

    def apart(kind, ask, *, log, environ, limit_s):
        shares.append(limit_s)
        loaded = launch.load(ask["argv"])
        assert not [*loaded.problems, *validate_step(loaded.run, node.devices)]
        return ANSWER | {"verdict": next(answers), "why": "so it is"}

    monkeypatch.setattr(suite, "apart", apart)
    devices = hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)
    node = suite.Node(devices, False, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_configs(node, 100.0)
    assert found.verdict == want and said in found.found
    assert [round(s) for s in shares] == [25, 33, 50, 100]


def test_the_budget_of_a_suite():
    assert sum(seconds for _, seconds in suite.PARTS.values()) <= suite.BUDGET_S == 1800


def test_a_state_that_comes_back_different(tmp_path, monkeypatch, kept_programs):
    """One bit of one tensor."""
    from jaxtrain.checkpoint import Checkpoints

    right = Checkpoints.restore

    def restore(self, *args, **kwargs):
        tensors = right(self, *args, **kwargs)
        name = "params.final_norm.scale"
        bits = jax.lax.bitcast_convert_type(tensors[name], jnp.uint32).at[0].add(jnp.uint32(1))
        return tensors | {name: jax.lax.bitcast_convert_type(bits, jnp.float32)}

    monkeypatch.setattr(Checkpoints, "restore", restore)
    monkeypatch.setattr(suite, "apart", here)
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_checkpoint(node, 60.0)
    assert found.verdict == "FAILED" and "1 tensors came back different: params.final_norm.scale" in found.found


def test_layouts_for_fewer_gpus():
    for count, text in suite.LAYOUTS.items():
        found, problems = suite.layouts.parse(text)
        assert not problems and max(layout.devices for layout in found) == count and found[0].name == "one"
    assert len(suite.LAYOUTS[8].split(",")) == 8


def test_a_step_that_differs_from_its_plan():
    planned = {"step_s": 1.0, "peak_gib": 51.0, "rates": "calibrated"}
    r = {"step_s": {"median": 1.2}, "memory": {"peak_gib": 50.0}, "planned": planned}
    assert suite.unlike_plan("a", r) == ["a: step time 1.20 times the plan"]
    published = planned | {"rates": rates.PUBLISHED}
    assert suite.unlike_plan("a", r | {"planned": published}) == [], "longer than a roofline without a comparable run"
    assert suite.unlike_plan("a", r | {"planned": published | {"range_s": [1.1, 1.3]}}) == []
    (text,) = suite.unlike_plan("a", r | {"planned": published | {"range_s": [1.05, 1.15], "peak_gib": 50.0}})
    assert text == "a: step time 1.20 times the plan (1.05 to 1.15 s are expected)"
    assert suite.unlike_plan("a", r | {"planned": None}) == []
    assert report.beside(1.2, 1.0) == "1.2 (1.20 x plan)" and report.beside(1.2, None) == "1.2"
