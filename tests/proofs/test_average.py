"""`checkpoint average`: its values are numpy's, its checkpoint is one like any other, and what has no average is refused."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxtrain.checkpoint import Checkpoints, files
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.commands import checkpoint, hf, sample
from jaxtrain.train import average as averaging

Tensors = dict[str, np.ndarray]
RUNS: dict[str, dict[str, Any]] = {
    "f32": {"train.ema_decay": 0.75},
    "bf16": {"dtypes.params": "bf16", "model.num_experts": 4, "model.router_bias": True, "mesh.expert": 2, "mesh.fsdp": 4},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains two runs, `a` and `b`, of other seeds, and returns their folder."""

    @functools.cache
    def train(kind: str) -> Path:
        made = tmp_path_factory.mktemp(kind)
        keys = {"train.steps": 4, "checkpoint.every_steps": 2, "eval.every_steps": 0}
        config = runs.smallest(made, keys | RUNS[kind])
        for seed, name in enumerate("ab"):
            assert runs.train(config, made / name, train__seed=seed) == 0
        return made

    return train


@pytest.fixture(params=RUNS)
def folder(request: pytest.FixtureRequest, trained: Callable[[str], Path]) -> Path:
    return trained(request.param)


@pytest.fixture
def two(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a folder with copies of two runs of float32 weights."""
    for name in "ab":
        shutil.copytree(trained("f32") / name, tmp_path / name)
    return tmp_path


def average(folder: Path, *words: str, out: str = "out") -> int:
    """Run the command. words: names in the folder, and options."""
    said = [word if word.startswith("--") else str(folder / word) for word in words]
    return checkpoint.main(["average", *said, f"--out={folder / out}"])


def assert_mean(
    got: dict[str, np.ndarray], of: list[dict[str, np.ndarray]], weights: list[float], kind: str = "params."
) -> None:
    """Assert that every value is the stored type's nearest to the mean in float64."""
    assert got and all(name.startswith("params.") for name in got)
    assert {name.removeprefix("params.") for name in got} == {n.removeprefix(kind) for n in of[0] if n.startswith(kind)}
    for name, y in got.items():
        theirs = [x[kind + name.removeprefix("params.")] for x in of]
        mean = sum(x.astype(np.float64) * w for x, w in zip(theirs, weights, strict=True)) / sum(weights)
        assert y.dtype == theirs[0].dtype and y.shape == theirs[0].shape
        word = y.view(np.uint16 if y.itemsize == 2 else np.uint32)
        error = np.abs(y.astype(np.float64) - mean)
        for neighbour in (word + 1, word - 1):
            with np.errstate(invalid="ignore"):
                assert not (np.abs(neighbour.view(y.dtype).astype(np.float64) - mean) < error).any(), name


@pytest.mark.parametrize("part", [averaging.CHUNK_BYTES, 1])
def test_values_are_the_nearest_to_the_mean(folder: Path, monkeypatch: pytest.MonkeyPatch, part: int):
    monkeypatch.setattr(averaging, "CHUNK_BYTES", part)
    out = f"out{part}"
    assert average(folder, "a", "b/checkpoints", "a/checkpoints/2", "--weights=1,2.5,-0.25", out=out) == 0
    of = [runs.tensors(folder / "a"), runs.tensors(folder / "b"), runs.tensors(folder / "a", 2)]
    assert_mean(runs.tensors(folder / out), of, [1, 2.5, -0.25])
    meta, first = (Checkpoints(folder / name / "checkpoints") for name in (out, "a"))
    meta, first = meta.meta(0), first.meta(4)
    assert [(each["step"], each["weight"], each["ema"]) for each in meta["averaged"]] == [
        (4, 1, False),
        (4, 2.5, False),
        (2, -0.25, False),
    ]
    assert [Path(each["path"]) for each in meta["averaged"]] == [folder / f"{x}/checkpoints/{n}" for x, n in ("a4", "b4", "a2")]
    assert meta["text"] == first["text"] and meta["config"]["model"] == first["config"]["model"]
    assert checkpoint.main(["verify", str(folder / out)]) == 0


def test_the_average_of_averages(folder: Path, capsys: pytest.CaptureFixture[str]):
    code = average(folder, "a", "b", "--ema", out="ema")
    if folder.name.startswith("bf16"):
        assert code == 2 and "--ema" in capsys.readouterr().err
        return
    assert code == 0
    assert_mean(runs.tensors(folder / "ema"), [runs.tensors(folder / name) for name in "ab"], [1, 1], "ema.")


def test_an_average_is_a_checkpoint_like_any_other(folder: Path, capfd: pytest.CaptureFixture[str]):
    """Training begins from it, and it is exported, imported, averaged again and sampled. It is no run to resume."""
    assert average(folder, "a", "b", out="mean") == 0
    mean = str(folder / "mean")
    config = folder / "small.py"
    assert runs.train(config, folder / "further", init__from=mean, train__steps=2, optimizer__lr=1e-30) == 0
    begun, exported = runs.tensors(folder / "further"), runs.tensors(folder / "mean")
    moved = [name for name, x in exported.items() if np.abs(begun[name].astype(np.float64) - x).max() > 1e-20]
    assert [name for name in moved if "router_bias" not in name] == [], "its steps are 0, but those of router_bias"
    before = runs.tree(folder / "mean")
    assert runs.train(config, folder / "mean") == 2 and "--workdir" in capfd.readouterr().err
    assert {name: x for name, x in runs.tree(folder / "mean").items() if name in before} == before
    assert hf.main(["export", mean, f"--out={folder / 'hf'}", "--raw"]) == 0
    assert hf.main(["import", str(folder / "hf"), f"--out={folder / 'back'}"]) == 0
    again = runs.tensors(folder / "back")
    assert again.keys() == exported.keys() and all(np.array_equal(again[name], exported[name]) for name in again)
    assert sample.main([f"--workdir={mean}", "--prompt=a", "--max-tokens=2"]) == 0
    assert average(folder, "mean", "a", "--weights=1,0", out="same") == 0
    same = runs.tensors(folder / "same")
    assert all(np.array_equal(same[name], exported[name]) for name in exported)


def test_rounding_is_to_nearest_once():
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -1 - 2**-8 - 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 0.0, 3e38])
    got = averaging.round_once(x, jnp.bfloat16).astype(np.float64)
    assert got[:5].tolist() == [1 + 2**-7, 1, -1 - 2**-7, 1, 1 + 2**-6] and got[6] == 0
    assert got[5] == np.float64(jnp.bfloat16(1e-40)) and abs(got[7] / 3e38 - 1) < 2**-8
    assert averaging.round_once(np.array(0.1), np.float32) == np.float32(0.1)


def with_meta(change: Callable[[dict[str, Any]], object], run: str = "b") -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / run / "checkpoints/4/meta.json"
        meta = files.unseal(path.read_text())
        change(meta)
        path.write_text(files.to_sealed_json(meta))

    return act


def flip(folder: Path) -> None:
    for path in (folder / "b/checkpoints/4/arrays").rglob("d/*"):  # any of them may hold the weights
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 8):
            data[at] ^= 1
        path.write_bytes(data)


def other_tokenizers(folder: Path) -> None:
    for run in "ab":
        with_meta(lambda meta, run=run: meta["text"].update(tokenizer_sha256=run), run)(folder)


def nothing(folder: Path) -> None:
    pass


def renamed(meta: dict[str, Any]) -> None:
    meta["tensors"]["params.final_norm2"] = meta["tensors"].pop(next(iter(meta["tensors"])))


def wider(meta: dict[str, Any]) -> None:
    next(value for name, value in meta["tensors"].items() if name.startswith("params."))[1] = "bfloat16"


REFUSED: dict[str, tuple[list[str], Callable[[Path], object], str]] = {  # words, change, a word of the error
    "one": (["a"], nothing, "CKPT = "),
    "a number too many": (["a", "b", "--weights=1,2,3"], nothing, "--weights = "),
    "not finite": (["a", "b", "--weights=1,inf"], nothing, "--weights = "),
    "no number": (["a", "b", "--weights=1,x"], nothing, "--weights = "),
    "a sum of 0": (["a", "b", "a/checkpoints/2", "--weights=0.1,0.2,-0.3"], nothing, "--weights = "),
    "beyond all floats": (["a", "b", "--weights=1e308,1e308"], nothing, "--weights = "),
    "in a run": (["a", "b", "--out"], nothing, "--out = "),
    "no such folder": (["a", "c"], nothing, "/c: "),
    "no such step": (["a", "b/checkpoints/3"], nothing, "2, 4"),
    "another model": (["a", "b"], with_meta(lambda meta: meta["config"]["model"].update(rope_base=5.0)), "model.rope_base"),
    "another tokenizer": (["a", "b"], other_tokenizers, "tokenizer_sha256"),
    "another tensor": (["a", "b"], with_meta(renamed), "params."),
    "another_type": (["a", "b"], with_meta(wider), "bfloat16"),
    "adapters": (["a", "b"], with_meta(lambda meta: meta.update(base={"path": "x", "digest": "y"})), "hf export"),
    "damaged arrays": (["a", "b"], flip, "/b/checkpoints/4"),
    "damaged meta.json": (["a", "b"], lambda folder: (folder / "b/checkpoints/4/meta.json").write_text("{}"), "meta.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_average_is_refused(two: Path, capfd: pytest.CaptureFixture[str], case: str):
    words, change, said = REFUSED[case]
    change(two)
    out = "a/out" if "--out" in words else "out"
    assert average(two, *(word for word in words if word != "--out"), out=out) == 2
    error = capfd.readouterr().err
    assert said in error and error.count("error: ") == 1 and "Traceback" not in error
    assert not (two / out).exists()


def test_a_base_and_its_chat_model_are_averaged_with_the_first_ones_texts(two: Path, capfd: pytest.CaptureFixture[str]):
    with_meta(lambda meta: meta["text"].update(template="{{ messages }}", taught=[7]))(two)
    with_meta(lambda meta: meta["config"]["model"].update(init_std=0.5))(two)
    assert average(two, "b", "a") == 0
    said = capfd.readouterr().out
    assert "taught, template" in said and "/a/checkpoints" in said
    of = [runs.tensors(two / name) for name in "ba"]
    assert_mean(runs.tensors(two / "out"), of, [1, 1])
    assert Checkpoints(two / "out/checkpoints").meta(0)["text"]["template"] == "{{ messages }}"


def test_a_folder_that_exists_is_left_as_it_is(two: Path, capfd: pytest.CaptureFixture[str]):
    (two / "out").mkdir()
    (two / "out/notes").write_text("mine")
    assert average(two, "a", "b") == 2 and str(two / "out") in capfd.readouterr().err
    assert [path.name for path in (two / "out").iterdir()] == ["notes"]


def test_a_failed_write_leaves_no_folder(two: Path, monkeypatch: pytest.MonkeyPatch):
    def full(storage: Storage, step: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", full)
        assert average(two, "a", "b") == 1
    assert not (two / "out").exists()
    assert average(two, "a", "b") == 0


@pytest.mark.parametrize("spec", ["tokenizer", "../tok", "/tok/"])
def test_a_tokenizer_is_copied_from_the_first_run_alone(two: Path, spec: str):
    """One that lies elsewhere stays there, and no other file is written."""
    spec = f"{two}{spec}" if spec.startswith("/") else spec
    place = two / "a/tokenizer" if spec == "tokenizer" else two / "tok"
    place.mkdir()
    (place / "tokenizer.json").write_text("of a")
    (two / "sub").mkdir()
    (two / "sub/tok").mkdir()
    (two / "sub/tok/tokenizer.json").write_text("another")
    with_meta(lambda meta: meta["config"]["data"].update(tokenizer=spec), "a")(two)
    assert average(two, "a", "b", out="sub/out") == 0
    assert (two / "sub/tok/tokenizer.json").read_text() == "another" and (place / "tokenizer.json").read_text() == "of a"
    named = two / "sub/out" / json.loads((two / "sub/out/config.json").read_text())["data"]["tokenizer"]
    assert (named / "tokenizer.json").read_text() == "of a"
    assert named.resolve() == (two / "sub/out/tokenizer" if spec == "tokenizer" else place)


def test_the_new_folder_stands_alone(two: Path):
    """The config of the first run names folders of its own, where neither checkpoints nor a tokenizer are looked for."""
    shutil.move(two / "a/checkpoints", two / "elsewhere")
    config = json.loads((two / "a/config.json").read_text())
    config["checkpoint"]["dir"] = str(two / "elsewhere")
    (two / "a/config.json").write_text(json.dumps(config))
    path = two / "elsewhere/4/meta.json"
    meta = files.unseal(path.read_text())
    meta["config"]["checkpoint"]["dir"] = str(two / "elsewhere")
    path.write_text(files.to_sealed_json(meta))
    assert average(two, "a", "b") == 0
    assert runs.steps(two / "out") == [0]
    assert sample.main([f"--workdir={two / 'out'}", "--prompt=a", "--max-tokens=1"]) == 0
    shutil.rmtree(two / "elsewhere")
    assert checkpoint.main(["list", str(two / "out")]) == 0
    assert math.isclose(1, sum(each["weight"] for each in Checkpoints(two / "out/checkpoints").meta(0)["averaged"]) / 2)
