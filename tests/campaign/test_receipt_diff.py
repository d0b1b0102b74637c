"""Two runs with one difference planted: `receipt diff` names it, and nothing else. The runs are real ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.code import lines_changed
from jaxtrain.receipt.compare import compare, differences
from jaxtrain.receipt.opened import open_run
from jaxtrain.receipt.result import GROUPS

# One process for several runs: most of the time of a small one goes to starting Python and jax.
SEVERAL = "import sys, json; from jaxtrain import main; sys.exit(max(main.main(line) for line in json.loads(sys.argv[1])))"
TINY = {
    "model__num_layers": 1,
    "train__steps": 3,
    "optimizer__warmup_steps": 1,
    "eval__every_steps": 0,
    "checkpoint__every_steps": 0,
    "log__tensorboard": False,
}
CHANGED = "jaxtrain/timeline.py"


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def token_file(folder: Path, text: bytes) -> Path:
    """A token file that always has the same name; where it lies is no difference."""
    folder.mkdir()
    byte = tokenizer.ByteTokenizer()
    with TokenWriter(folder / "text.tok", tokenizer.info(byte)) as writer:
        for line in text.splitlines():
            writer.write(byte.encode(line.decode()), len(line))
            writer.end_document()
    return folder / "text.tok"


class Bench:
    """A checkout of jaxtrain with one commit, and runs of it."""

    def __init__(self, folder: Path):
        self.folder, self.repo = folder, folder / "repo"
        package = Path(runs.REPO / "jaxtrain")
        shutil.copytree(package, self.repo / "jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
        git(self.repo, "init", "-q")
        git(self.repo, "add", ".")
        git(self.repo, "commit", "-qm", "one")
        (folder / "small.py").write_text(runs.SMALL)
        text = b"".join(b"the square of %d is %d\n" % (n, n * n) for n in range(1000))
        self.data = token_file(folder / "data", text)
        self.other_data = token_file(folder / "other", text.replace(b"is 49\n", b"is 48\n"))
        # A package says of itself which version it is, and the first on the path is asked.
        about = folder / "fake" / "optax-99.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99.0\n")

    def run(self, runs_of: dict[str, dict[str, Any]], path: str = "", **env: str) -> None:
        """Trains these runs, by name of their folders, in one process."""
        lines = []
        for name, overrides in runs_of.items():
            given = {**TINY, "data__source": self.data, "paths__cache": self.folder / "cache", **overrides}
            lines.append(runs.arguments(self.folder / "small.py", self.folder / name, given))
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "JAXTRAIN_"))}
        environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{path}:{self.repo}", **env}
        line = [sys.executable, "-c", SEVERAL, json.dumps(lines)]
        done = subprocess.run(line, cwd=self.repo, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("planted"))
    there = {"data__source": bench.other_data}
    moved = {"checkpoint__dir": bench.folder / "elsewhere", "log__every_steps": 2, "paths__cache": ""}
    forked = {"checkpoint__dir": bench.folder / "base" / "checkpoints"}
    bench.run({"base": {}, "again": moved, "key": {"optimizer__lr": 0.02}, "file": there, "forked": forked})
    bench.run({"variable": {}}, JAX_DEFAULT_MATMUL_PRECISION="highest")
    bench.run({"package": {}}, path=str(bench.folder / "fake"))
    source = bench.repo / CHANGED
    source.write_text("".join(["# Another line.\n", *source.read_text().splitlines(keepends=True)[1:]]))
    bench.run({"line": {}})
    return bench


def planted(bench: Bench, name: str) -> list[tuple[str, str]]:
    found = compare(open_run(bench.folder / "base"), open_run(bench.folder / name))
    return [(d.group, d.name) for d in found.differences]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("again", []),
        ("variable", [("environment", "JAX_DEFAULT_MATMUL_PRECISION")]),
        ("key", [("config", "optimizer.lr")]),
        ("package", [("versions", "optax")]),
        ("file", [("data", "text.tok")]),
        ("line", [("code", CHANGED)]),
        ("forked", [("data", "first state")]),
    ],
)
def test_what_was_planted_is_named_and_nothing_else(bench: Bench, name: str, expected: list[tuple[str, str]]) -> None:
    assert planted(bench, name) == expected


def test_the_command_says_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(bench.folder / "base")
    assert command.main(["diff", base, str(bench.folder / "line")]) == 1
    said = capsys.readouterr().out
    first = (runs.REPO / CHANGED).read_text().splitlines()[0]
    assert f"line 1: - {first}\n      line 1: + # Another line.\n" in said
    assert "loss: the same, bit for bit, at the 3 steps that both have, to step 3" in said
    assert "not there" not in said and "note" not in said
    assert command.main(["diff", base, str(bench.folder / "again")]) == 0
    assert "nothing differs that can explain" in capsys.readouterr().out
    assert command.main(["diff", base, str(bench.folder / "key"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [
        {"group": "config", "name": "optimizer.lr", "a": "0.01", "b": "0.02", "lines": [], "earlier": False}
    ]
    assert [each["said"] for each in found["outcomes"] if each["name"] == "loss"] == [
        "differs from step 2 on; the same to step 1"
    ]


def test_a_receipt_says_which_source_ran(bench: Bench) -> None:
    base, line = (runs.receipt(bench.folder / name)["source"] for name in ("base", "line"))
    assert base["commit"] == line["commit"] == git(bench.repo, "rev-parse", "HEAD")
    assert (base["dirty"], base["patch"], line["dirty"]) == (False, "", True)
    assert line["patch"] == git(bench.repo, "diff", "HEAD", "--no-ext-diff", "--no-color") + "\n"
    assert base["files"].keys() == line["files"].keys() and len(base["files"]) > 100


# ---- Lines of code, by the patches of two checkouts of one commit


BASE = [f"line {n}" for n in range(1, 41)]


def version(repo: Path, change: dict[int, list[str]]) -> dict[str, Any]:
    """The source of a checkout in which these lines (from 1) are others."""
    text = [row for n, old in enumerate(BASE, 1) for row in change.get(n, [old])]
    (repo / "jaxtrain").mkdir(exist_ok=True)
    (repo / "jaxtrain" / "a.py").write_text("\n".join(text) + "\n")
    if not (repo / ".git").exists():
        git(repo, "init", "-q")
        git(repo, "add", ".")
        git(repo, "commit", "-qm", "one")
    return {"commit": git(repo, "rev-parse", "HEAD"), "patch": git(repo, "diff", "HEAD", "--no-ext-diff", "--no-color")}


def test_lines_that_differ_between_two_patches(tmp_path: Path) -> None:
    clean = version(tmp_path, {})
    one = version(tmp_path, {5: ["five"], 20: [], 30: ["line 30", "--- a/no file", "more"]})
    two = version(tmp_path, {5: ["FIVE"], 30: ["line 30", "--- a/no file", "more"]})
    ways = lambda a, b: lines_changed("jaxtrain/a.py", a, b)  # noqa: E731
    assert ways(clean, clean) == ways(one, one) == []
    assert ways(clean, one) == [
        "line 5: - line 5",
        "line 5: + five",
        "line 20: - line 20",
        "line 31: + --- a/no file",
        "line 31: + more",
    ]
    assert ways(one, two) == ["line 5: - five", "line 5: + FIVE", "line 20: + line 20"]
    assert ways(two, one) == ["line 5: - FIVE", "line 5: + five", "line 20: - line 20"]
    assert ways(one, {**two, "commit": "another"}) == []
    assert ways(one, {**two, "patch_cut": 1}) == ways({**one, "patch_cut": 1}, two) == []
    many = version(tmp_path, {n: [f"other {n}"] for n in range(1, 41)})
    assert ways(clean, many)[-1] == "... and 40 more lines" and len(ways(clean, many)) == 41


# ---- What explains nothing, and what does, on receipts that are made up from one of a run


def changed(bench: Bench, path: str, value: Any, **also: Any) -> list[tuple[str, str, str, str]]:
    """What `differences` finds where one field of a receipt, by its dotted path, has another value."""
    receipt = {**runs.receipt(bench.folder / "base"), **also}
    other = json.loads(json.dumps(receipt))
    *folders, last = path.split(".")
    inner = other
    for name in folders:
        inner = inner.setdefault(name, {})
    inner[last] = value
    config = json.loads((bench.folder / "base" / "config.json").read_text())
    found, notes = differences(receipt, other, config, config)
    assert not notes
    return [(d.group, d.name, d.a, d.b) for d in found]


GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "uuid": "GPU-1",
    "pci": "0000:18:00.0",
    "power_limit_w": 700.0,
    "power_limit_default_w": 700.0,
    "max_sm_clock_mhz": 1980,
    "max_memory_clock_mhz": 3201,
    "ecc": True,
}
STATE = {"index": 0, "sm_clock_mhz": 1980, "power_w": 650.0, "throttle_reasons": "sw_power_cap", "ecc_uncorrected": 0}
MACHINE = {
    "cpu": {"model": "a CPU", "count": 192, "memory_gib": 2015.3},
    "kernel": "6.8",
    "gpus": [GPU, {**GPU, "index": 1}],
    "topology": {"nvlinks": [18, 18], "pairs": {"NVLink": 1}},
    "before": [STATE],
    "after": [STATE],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "x"),
        ("started", "x"),
        ("command", "x"),
        ("host.name", "x"),
        ("config", "x"),
        ("restart", 3),
        ("environment.SLURM_JOB_ID", "7"),
        ("environment.JAXTRAIN_COMMIT", "x"),
        ("environment.NCCL_DEBUG", "INFO"),
        ("env.set.XLA_CLIENT_MEM_FRACTION", "0.9"),
        ("environment.XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("hardware.gpus", [{**GPU, "uuid": "GPU-2", "pci": "x"}, {**GPU, "index": 1}]),
        ("hardware.after", [{**STATE, "sm_clock_mhz": 1500, "power_w": 80.0, "throttle_reasons": ""}]),
        ("hardware.after", [{**STATE, "throttle_reasons": "hw_thermal"}]),  # one look says nothing of the run
        ("throttled", [{"gpu": 0, "share": 0.1, "reasons": "hw_thermal"}]),
        ("hardware.cpu.memory_gib", 2015.4),
        ("source.commit", "x"),  # of files that are the same
        ("source.patch", "a README"),
        ("compile_s", 99.0),
        ("attention", "another kernel"),
        ("versions.jax", "told as a package"),
        ("preflight.nodes", [{"measured": {"all_reduce_bus_gb_s": 460.0}}]),
    ],
)
def test_what_explains_nothing_is_no_difference(bench: Bench, path: str, value: Any) -> None:
    preflight = {"nodes": [{"measured": {"all_reduce_bus_gb_s": 475.0}}]}
    assert changed(bench, path, value, hardware=MACHINE, preflight=preflight) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("devices.count", 8, ("hardware", "devices", "1 x cpu", "8 x cpu")),
        ("devices.process_count", 2, ("hardware", "processes", "1", "2")),
        (
            "hardware.gpus",
            [GPU, {**GPU, "power_limit_w": 500.0}],
            ("hardware", "GPUs: power_limit_w", "2 x 700.0", "1 x 700.0, 1 x 500.0"),
        ),
        ("hardware.topology.pairs", {"PHB": 1}, ("hardware", "links of GPU pairs", "1 x NVLink", "1 x PHB")),
        (
            "throttled",
            [{"gpu": 0, "share": 0.2, "reasons": "hw_thermal"}],
            ("hardware", "GPU 0: throttled by", "not there", "hw_thermal"),
        ),
        (
            "hardware.after",
            [{**STATE, "ecc_uncorrected": 2}],
            ("hardware", "GPU 0: new uncorrected ECC errors", "not there", "2"),
        ),
        (
            "preflight.nodes",
            [{"measured": {"all_reduce_bus_gb_s": 475.0}}, {"measured": {"all_reduce_bus_gb_s": 311.0}}],
            ("hardware", "preflight: all_reduce_bus_gb_s", "475 GB/s", "311 GB/s"),
        ),
        ("environment.XLA_FLAGS", "--xla_a=1 --xla_b", ("environment", "XLA_FLAGS --xla_a", "not there", "1")),
        ("env.set.NCCL_PROTO", "Simple", ("environment", "NCCL_PROTO", "not there", "Simple")),
        ("versions.driver", "580.1", ("versions", "driver", "570.2", "580.1")),
        ("python", "3.13.0", ("versions", "Python", sys.version.split()[0], "3.13.0")),
        ("eval_data.code", {"split": "x", "kind": "b"}, ("data", "held out (code): kind", "a", "b")),
    ],
)
def test_what_explains_something_is_named(bench: Bench, path: str, value: Any, expected: tuple[str, ...]) -> None:
    base = runs.receipt(bench.folder / "base")
    also = {"hardware": MACHINE, "preflight": {"nodes": [{"measured": {"all_reduce_bus_gb_s": 475.0}}]}}
    also |= {"versions": base["versions"] | {"driver": "570.2"}, "eval_data": {"code": {"split": "y", "kind": "a"}}}
    found = changed(bench, path, value, **also)
    assert found[0] == expected and len(found) == (2 if "XLA_FLAGS" in path else 1)
    assert all(group in GROUPS for group, *_ in found)


def test_what_follows_from_a_key_is_not_named_again(bench: Bench) -> None:
    receipt = runs.receipt(bench.folder / "base")
    config = json.loads((bench.folder / "base" / "config.json").read_text())
    repeatable = {**config, "train": {**config["train"], "deterministic": True}}
    with_algorithm = {**receipt, "env": {"set": {"NCCL_ALGO": "^NVLS"}, "inherited": {}}}
    found, _ = differences(receipt, with_algorithm, config, repeatable)
    assert [(d.group, d.name) for d in found] == [("config", "train.deterministic")]
    found, _ = differences(receipt, with_algorithm, config, config)
    assert [(d.group, d.name) for d in found] == [("environment", "NCCL_ALGO")]
    written_out = {**config, "mesh": {**config["mesh"], "fsdp": 1, "data": 1}}
    assert receipt["mesh"]["fsdp"] == 1 and config["mesh"]["fsdp"] == -1
    assert differences(receipt, receipt, config, written_out) == ((), [])
    other = {**receipt, "mesh": {**receipt["mesh"], "fsdp": 2}}
    found, _ = differences(receipt, other, config, {**config, "mesh": {**config["mesh"], "fsdp": 2}})
    assert [(d.name, d.a, d.b) for d in found] == [("mesh.fsdp", "-1", "2")]


def test_mixtures_are_compared_by_what_their_files_hold(bench: Bench) -> None:
    def files(*given: tuple[str, str, float]) -> list[dict[str, Any]]:
        return [{"name": n, "content_sha256": c, "weight": w, "tokens": 10, "documents": 1} for n, c, w in given]

    def found(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        receipt = runs.receipt(bench.folder / "base")
        sides = [{**receipt, "data": {**receipt["data"], "files": side}} for side in (a, b)]
        return [(d.name, d.a, d.b) for d in differences(*sides, None, None)[0]]

    base = files(("web", "a" * 64, 0.7), ("code", "b" * 64, 0.3))
    assert found(base, files(("renamed", "a" * 64, 0.7), ("code", "b" * 64, 0.3))) == []
    assert found(base, files(("code", "b" * 64, 0.3), ("web", "a" * 64, 0.7))) == [
        ("order of the files", "web, code", "code, web")
    ]
    assert found(base, files(("web", "a" * 64, 0.6), ("code", "b" * 64, 0.3))) == [("weight of web", "0.7", "0.6")]
    c = "10 tokens, sha256 cccccccccccc"
    assert found(base, files(*[("web", "a" * 64, 0.7), ("code", "b" * 64, 0.3)], ("more", "c" * 64, 0.1))) == [
        ("more", "not there", c)
    ]
    assert found(base, files(("web", "c" * 64, 0.7), ("code", "b" * 64, 0.3))) == [
        ("web", "10 tokens, sha256 aaaaaaaaaaaa", c),
    ]


def test_a_receipt_of_the_format_before_is_compared_by_what_it_has(bench: Bench) -> None:
    new = runs.receipt(bench.folder / "base")
    gone = ("source", "versions", "hardware", "env", "resolved", "launch", "preflight")
    old = {
        **{name: value for name, value in new.items() if name not in gone},
        "format": 1,
        "git": {"commit": "x", "dirty": True},
    }
    config = json.loads((bench.folder / "base" / "config.json").read_text())
    found, notes = differences(old, new, config, config)
    assert [(d.group, d.name, d.a) for d in found] == [("code", "commit", "x")] and notes == []
    old["git"]["commit"] = new["source"]["commit"]
    found, notes = differences(old, new, None, config)
    assert found == () and [note.partition(":")[0] for note in notes] == ["code", "config"]


# ---- What is told of more than the newest attempt


def two_attempts(bench: Bench, folder: Path, newest: dict[str, Any], **first: Any) -> Path:
    """A run of two attempts: some fields of the newest, and of the first, are others than those of `base`."""
    folder.mkdir(parents=True)
    receipt = runs.receipt(bench.folder / "base")
    early = {name: value for name, value in receipt.items() if name != "attempts"} | {"id": "early", "loaded": None} | first
    shutil.copy(bench.folder / "base" / "config.json", folder)
    (folder / "receipt.json").write_text(json.dumps({**receipt, "attempt": 2, "attempts": [early], **newest}))
    return folder


def loaded(saved_by: str, **changes: Any) -> dict[str, Any]:
    return {"loaded": {"from": "/other/checkpoints", "step": 1000, "saved_by": saved_by, "digest": "a" * 64, **changes}}


def found_in(bench: Bench, folder: Path, other: Path | None = None) -> list[tuple[str, str, str]]:
    found = compare(open_run(folder), open_run(other or bench.folder / "base"))
    assert found.same == (not found.differences) and not found.notes
    return [(f"{d.group} {d.title}", d.a, d.b) for d in found.differences]


def test_an_earlier_attempt_that_ran_otherwise_is_a_difference(bench: Bench, tmp_path: Path) -> None:
    jax = runs.receipt(bench.folder / "base")["packages"] | {"jax": "0.1"}
    named = [("versions jax (in earlier attempts)", "0.1 in attempt 1", "as at the end")]
    went_on = two_attempts(bench, tmp_path / "on", loaded("early"), packages=jax)
    assert found_in(bench, went_on) == named
    assert command.main(["diff", str(went_on), str(bench.folder / "base")]) == 1
    assert found_in(bench, two_attempts(bench, tmp_path / "again" / "on", loaded("early"), packages=jax), went_on) == []
    before = two_attempts(bench, tmp_path / "old", {"resumed_from_step": 2}, packages=jax)
    without = {name: value for name, value in runs.receipt(before).items() if name != "loaded"}  # as was once written
    (before / "receipt.json").write_text(json.dumps(without))
    assert found_in(bench, before) == named
    # One that nothing is left of, such as one that ran out of memory, explains nothing.
    assert found_in(bench, two_attempts(bench, tmp_path / "anew", {"loaded": None}, packages=jax)) == []


def test_what_a_run_began_from_is_compared(bench: Bench, tmp_path: Path) -> None:
    seed, step = "made from train.seed", "step 1000 of /other/checkpoints, digest aaaaaaaaaaaa"
    foreign = two_attempts(bench, tmp_path / "foreign", loaded("early"), **loaded("of another run"))
    assert found_in(bench, foreign) == [("data first state", step, seed)]
    moved = loaded("of another run", **{"from": "/copied"})
    assert found_in(bench, foreign, two_attempts(bench, tmp_path / "moved", loaded("early"), **moved)) == []
    other = loaded("of another run", digest="b" * 64)
    assert len(found_in(bench, foreign, two_attempts(bench, tmp_path / "other", loaded("early"), **other))) == 1


def test_init_from_is_compared_by_its_weights(bench: Bench, tmp_path: Path) -> None:
    def run(name: str, path: str, digest: str | None) -> Path:
        folder = two_attempts(bench, tmp_path / name, {"loaded": {**loaded("")["loaded"], "from": path, "step": None}})
        receipt = json.loads((folder / "receipt.json").read_text())
        receipt["loaded"]["digest"], receipt["attempts"] = digest, []
        receipt["resolved"] = json.loads((folder / "config.json").read_text())
        receipt["resolved"]["init"]["from"] = path
        (folder / "receipt.json").write_text(json.dumps(receipt))
        return folder

    here = run("here", "/a", "d" * 32)
    assert found_in(bench, here, run("moved", "/b", "d" * 32)) == []
    assert [name for name, *_ in found_in(bench, here, run("changed", "/a", "e" * 32))] == ["data first state"]
    assert [name for name, *_ in found_in(bench, here, run("untold", "/b", None))] == ["config init.from"]


def test_a_key_that_one_config_lacks_has_its_default(bench: Bench) -> None:
    receipt = runs.receipt(bench.folder / "base")
    config = json.loads((bench.folder / "base" / "config.json").read_text())
    older = {**config, "optimizer": {name: value for name, value in config["optimizer"].items() if name != "beta1"}}
    assert differences(receipt, receipt, older, config) == ((), [])
    config["optimizer"]["beta1"] = 0.5
    found, _ = differences(receipt, receipt, older, config)
    assert [(d.name, d.a, d.b) for d in found] == [("optimizer.beta1", "0.9", "0.5")]


def test_what_utilisation_is_counted_by_is_compared(bench: Bench) -> None:
    receipt = runs.receipt(bench.folder / "base")
    config = json.loads((bench.folder / "base" / "config.json").read_text())
    found, _ = differences(receipt, receipt, config, {**config, "log": {**config["log"], "peak_tflops": 5.0, "every_steps": 9}})
    assert [(d.group, d.name, d.b) for d in found] == [("config", "log.peak_tflops", "5.0")]
