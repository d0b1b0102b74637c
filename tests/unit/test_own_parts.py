"""Parts from outside the package: what is wrong with their modules, and which of their lines an error is from."""

import io
import linecache
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.commands import api
from jaxtrain.commands.command import run_command
from jaxtrain.config import own_parts, schema
from jaxtrain.config.command_line import Parser
from jaxtrain.config.own_parts import WrongPart, check_module, load_part, problem_of
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data.batches import UserSource
from jaxtrain.step.loss import find_loss

COMMAND = Parser("sample", "Continue a text.")
MODULES = {
    "sound.py": "def part(*args):\n    return helper(*args)\n\n\ndef helper(*args):\n    return 1 / args[0]\n",
    "syntax.py": "x = 1\ndef f(:\n",
    "raises.py": "x = 1\nraise ValueError('at import')\n",
    "imports.py": "import os\nimport no_such_package_at_all\n",
    "package/__init__.py": "1 / 0\n",
    "package/inner.py": "x = 1\n",
    "losses.py": "import jax.numpy as jnp\n\n\n"
    "def row(hidden, head, batch, spec):\n    return jnp.zeros(3)\n\n\n"
    "def half(hidden, head, batch, spec):\n    return jnp.zeros((), jnp.bfloat16)\n\n\n"
    "def nothing(hidden, head, batch, spec):\n    return None\n",
    "optimizers.py": "import jax\nimport optax\n\n\n"
    "def of(update, init=lambda p: ()):\n    return lambda *args: optax.GradientTransformation(init, update)\n\n\n"
    "none = lambda *args: None\n"
    "alone = of(lambda u, s, p=None: u)\n"
    "tree = of(lambda u, s, p=None: ({'a': 1}, s))\n"
    "shape = of(lambda u, s, p=None: (jax.tree.map(lambda x: x.sum(), u), s))\n"
    "state = of(lambda u, s, p=None: (u, (s, s)))\n"
    "three = lambda optimizer, dtypes, axes: optax.identity()\n"
    "number = 3\n"
    "def closure(*args):\n    def update(u, s, p=None):\n        return u[0]\n"
    "    return optax.GradientTransformation(lambda p: (), update)\n"
    "def ends(*args):\n    raise SystemExit(7)\n",
    "exits.py": "raise SystemExit(3)\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the modules in the package `lab_of_mine`, on sys.path, and forget them after the test."""
    place = tmp_path / "lab_of_mine"
    for name, text in MODULES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_parts, "_loaded", {})
    linecache.checkcache()
    yield place
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab_of_mine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_lab.model:Family", ["'no_such_lab'", "PYTHONPATH"]),
        ("lab_of_mine.no_such:Family", ["'lab_of_mine.no_such'"]),
        ("lab_of_mine.sound:prat", ["sound.py", "lab_of_mine.sound:part"]),
        ("lab_of_mine.syntax:Family", ["SyntaxError", "syntax.py:2"]),
        ("lab_of_mine.raises:Family", ["ValueError: at import", "raises.py:2"]),
        ("lab_of_mine.imports:Family", ["ModuleNotFoundError", "imports.py:2", "no_such_package_at_all"]),
        ("lab_of_mine.package.inner:Family", ["ZeroDivisionError", "__init__.py:1"]),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_problem_with_its_line(value: str, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_part("loss.name", value)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("loss.name", value)
    assert all(words in str(problem) for words in said)


def test_a_package_that_cannot_be_imported_is_found_without_jax():
    assert check_module("loss.name", "lab_of_mine.sound:part") is None
    assert "PYTHONPATH" in str(check_module("loss.name", "no_such_lab.sound:part"))
    assert "__init__.py:1" in str(check_module("loss.name", "lab_of_mine.package.inner:part"))


def failure(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def test_the_innermost_line_of_the_part_is_named(folder: Path):
    part = load_part("loss.name", "lab_of_mine.sound:part")
    load_part("optimizer.name", "lab_of_mine.optimizers:tree")
    error = failure(lambda: part(0))
    problem = problem_of(error)
    assert problem is not None and (problem.key, problem.value) == ("loss.name", "lab_of_mine.sound:part")
    line = f"ZeroDivisionError: division by zero in {folder / 'sound.py'}:6, in helper: return 1 / args[0]"
    assert problem.rule == line
    stream = io.StringIO()
    assert own_parts.report_error(error, stream)
    first, second = stream.getvalue().splitlines()
    assert line in first and f"{folder / 'sound.py'}:2" in second


def test_errors_of_jax_in_the_part_are_of_the_part(folder: Path):
    part = load_part("loss.name", "lab_of_mine.sound:part")
    problem = problem_of(failure(lambda: jax.jit(lambda x: part(jnp.concatenate([x, x]) if part(x) is None else int(x)))(2.0)))
    assert problem is None  # the line is of this file, which is no part
    problem = problem_of(failure(lambda: jax.jit(part)({})))
    assert problem is not None and f"{folder / 'sound.py'}:6" in problem.rule


def test_other_errors_are_left_alone(capsys: pytest.CaptureFixture[str]):
    part = load_part("loss.name", "lab_of_mine.sound:part")

    class Layout:
        def __rtruediv__(self, other: Any) -> Any:
            raise ConfigError([Problem("mesh", None, "is impossible", "Set another.")])

    assert problem_of(failure(lambda: part(Layout()))) is None
    assert problem_of(failure(lambda: {}["key of jaxtrain"])) is None
    with pytest.raises(KeyError):
        run_command(COMMAND, [], lambda _: {}["key of jaxtrain"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("errors", [(), (ArithmeticError,), (ValueError,)])
def test_a_command_names_the_line_first_and_is_refused(errors: Any, capsys: pytest.CaptureFixture[str]):
    part = load_part("model.family", "lab_of_mine.sound:part")
    assert run_command(COMMAND, [], lambda _: part(0), errors=errors) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("error: model.family = ") and "sound.py:6" in first


def test_functions_of_the_api_add_the_line(monkeypatch: pytest.MonkeyPatch):
    load_part("model.family", "lab_of_mine.sound:part")
    from jaxtrain.report import run

    monkeypatch.setattr(run, "read_run", lambda folder, kind: load_part("model.family", "lab_of_mine.sound:part")(0))
    error = failure(lambda: api._with_user_line(api.open_run)("anything"))
    assert isinstance(error, ZeroDivisionError) and "sound.py:6" in error.__notes__[0]


# ---- What parts return


@pytest.mark.parametrize("name", ["row", "half", "nothing"])
def test_a_loss_returns_one_float32(name: str):
    error = failure(lambda: find_loss(f"lab_of_mine.losses:{name}").function(None, None, {}, None))  # pyright: ignore
    assert isinstance(error, WrongPart) and error.problem.key == "loss.name"


@pytest.mark.parametrize("name", ["none", "alone", "tree", "shape", "state"])
def test_an_optimizer_returns_updates_and_a_state_like_those_it_received(name: str):
    from jaxtrain.optim.optimizer import make_optimizer

    params = {"w": jnp.ones((2, 3))}

    def step() -> Any:
        tx = make_optimizer(schema.Optimizer(name=f"lab_of_mine.optimizers:{name}"), schema.Dtypes(), {})
        return tx.update(params, tx.init(params), params)

    error = failure(step)
    assert isinstance(error, WrongPart) and error.problem.key == "optimizer.name"


def test_a_sound_optimizer_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    from jaxtrain.optim.optimizer import make_optimizer

    module = sys.modules[load_part("loss.name", "lab_of_mine.sound:part").__module__]
    monkeypatch.setattr(module, "adam", lambda *args: optax.scale_by_adam(), raising=False)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    tx = make_optimizer(schema.Optimizer(name="lab_of_mine.sound:adam"), schema.Dtypes(), {})
    ours, theirs = (t.update(params, t.init(params), params) for t in (tx, optax.scale_by_adam()))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


BATCH = {name: np.zeros((4, 8), dtype) for name, dtype in BATCH_KEYS.items()}


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [BATCH],
        {k: v for k, v in BATCH.items() if k != "weights"},
        {k: v[:, 1:] for k, v in BATCH.items()},
        {k: v[:3] for k, v in BATCH.items()},
        BATCH | {"tokens": BATCH["tokens"] * 1.0},
        BATCH | {"weights": BATCH["tokens"]},
        BATCH | {"tokens": BATCH["tokens"] + 264},
        BATCH | {"targets": BATCH["targets"] - 1},
        BATCH | {"segments": BATCH["segments"].astype(np.int64) + 2**33},
    ],
)
def test_a_source_returns_the_arrays_of_a_batch(batch: Any):
    class Source:
        rank = 7

        def batch(self, step: int, rows: Any = None) -> Any:
            return batch

    source = UserSource("data.source", "lab_of_mine.sound:part", Source(), ("batch",), 4, 8, 264)
    assert source.rank == 7 and not hasattr(source, "text")
    error = failure(lambda: source.batch(0))
    assert isinstance(error, WrongPart) and error.problem.key == "data.source"
    batch = {k: v[:2] for k, v in BATCH.items()}
    assert source.batch(0, np.array([0, 3])).keys() == BATCH.keys()
    assert source.batch(0, slice(1, 3)).keys() == BATCH.keys()
    assert isinstance(failure(lambda: UserSource("data.source", "a:b", Source(), ("epoch",), 4, 8, 0)), WrongPart)


def test_an_error_belongs_to_the_part_that_was_called():
    """All parts may be in one module, and their calls closures: the part whose call fails is named, whatever was loaded."""
    from jaxtrain.optim.optimizer import make_optimizer

    for key in ("model.family", "data.source", "loss.name"):
        load_part(key, "lab_of_mine.optimizers:closure")
    params = {"w": jnp.ones((2, 3))}

    def step(name: str) -> Any:
        tx = make_optimizer(schema.Optimizer(name=f"lab_of_mine.optimizers:{name}"), schema.Dtypes(), {})
        return tx.update(params, tx.init(params), params)

    for name, words in {"closure": "optimizers.py", "three": "(optimizer, dtypes, axes, own)", "ends": "7"}.items():
        problem = problem_of(failure(lambda name=name: step(name)))
        assert problem is not None and problem.key == "optimizer.name" and words in str(problem)
        assert problem.value == f"lab_of_mine.optimizers:{name}"


@pytest.mark.parametrize("value", ["lab_of_mine.optimizers:number", "lab_of_mine.exits:x", "lab_of_mine.optimizers:optaxx"])
def test_what_is_no_function_is_refused_at_its_import(value: str):
    error = failure(lambda: load_part("optimizer.name", value))
    assert isinstance(error, ConfigError) and [p.key for p in error.problems] == ["optimizer.name"]


def test_a_source_that_ends_is_a_problem_of_the_source():
    class Source:
        batches = iter([BATCH])

        def batch(self, step: int, rows: Any = None) -> Any:
            return next(self.batches)

    source = UserSource("data.source", "lab_of_mine.sound:part", Source(), ("batch",), 4, 8, 0)
    assert source.batch(0).keys() == BATCH.keys()
    error = failure(lambda: source.batch(1))
    assert isinstance(error, WrongPart) and "StopIteration" in str(error)


def test_ctrl_c_in_a_part_is_no_error_of_it():
    load_part("loss.name", "lab_of_mine.sound:part")
    assert problem_of(KeyboardInterrupt()) is None


def test_a_search_asks_again_after_a_change_in_the_package(folder: Path):
    from jaxtrain.plan import search_cache

    before = search_cache._digest_of_module("lab_of_mine.sound:part")
    (folder / "losses.py").write_text("x = 1\n")
    assert before != search_cache._digest_of_module("lab_of_mine.sound:part")
