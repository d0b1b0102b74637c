"""`prepare` in processes: the same file whatever their number, resumed from finished parts, and what may go wrong with them."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import datasets_input, prepare, readers, shards
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.rows import TextRows
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.verify import verify

BYTE = text_tokenizers.ByteTokenizer()


def texts(path: Path) -> list[str]:
    file = TokenFile.open(path)
    return [BYTE.decode(file.tokens[a:b]) for a, b in itertools.pairwise(file.doc_offsets[:].tolist())]


def write_lines(path: Path, count: int, words: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": f"line {i}: " + "some words " * (i % words)}) + "\n" for i in range(count)))
    return path


def start(folder: Path, *args: str, program: str = "") -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "jaxtrain.data"]
    return subprocess.Popen([*command, "prepare", *args], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, "ended before it could be stopped: " + process.communicate()[1]
        time.sleep(0.002)


def finished(folder: Path) -> list[Path]:
    return sorted((folder / "a.tok.partial").glob("*/*.json"))


def children(pid: int) -> list[int]:
    """Processes that a process has started and that read shards."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in found if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with JSON lines, Parquet of several row groups, texts and a compressed file."""
    folder = tmp_path_factory.mktemp("corpus")
    write_lines(folder / "a.jsonl", 2000)
    rows = [f"row {i} " + "of a table " * (i % 30) for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "id": range(3000)}), folder / "b.parquet", row_group_size=500)
    for i in range(20):
        (folder / f"t{i:02}.txt").write_text(f"text {i}\n" * i)
    (folder / "z.jsonl.zst").write_bytes(zstandard.compress(write_lines(folder / "z", 300).read_bytes()))
    (folder / "z").unlink()
    return folder


COMMAND = ("--input=*.jsonl", "--input=*.parquet", "--input=*.txt", "--input=*.zst", "--output=a.tok", "--validation=0.2")


def test_the_file_is_the_same_for_any_number_of_processes_and_size_of_parts(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus)
    inputs = [a.removeprefix("--input=") for a in COMMAND if a.startswith("--input=")]
    made = {}
    for processes, shard_mb in ((1, 64), (1, 0.2), (2, 0.1)):
        out = tmp_path / f"{processes}-{shard_mb}.tok"
        prepare.prepare(inputs, out, validation=0.2, processes=processes, shard_mb=shard_mb)
        made[processes, shard_mb] = [p.read_bytes() for p in (out, prepare.validation_path(out))]
        assert verify(out) == []
    assert all(files == made[1, 64] for files in made.values())
    assert len(texts(tmp_path / "1-64.tok")) + len(texts(tmp_path / "1-64.val.tok")) == 2000 + 3000 + 19 + 300
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.merging*"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["", "{}", "x", '{"text": "a"}', '{"text": "b\\nü"}', "ü" * 9]), max_size=12), st.integers(1, 60)
)
def test_parts_of_a_file_are_its_lines_once_each_with_their_numbers(tmp_path_factory, lines, part_bytes):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text("\n".join(lines))
    said, parts = [], []
    for size in (1 << 30, part_bytes):
        named, pieces = [], []
        for cut in readers.cut_file(path, "jsonl", size):
            pieces += [p.text for p in readers.read(readers.Input(cut, TextRows(["text"], ""), named.append))]
        said.append(named)
        parts.append(pieces)
    assert parts[0] == parts[1] == [json.loads(line)["text"] for line in lines if line.startswith('{"')]
    assert said[0] == said[1]
    assert [s.split(":")[1] for s in said[0]] == [str(i) for i, line in enumerate(lines, 1) if line and '"' not in line]


def test_bad_lines_of_parts_have_their_numbers_and_stop_alike(tmp_path):
    lines = [json.dumps({"text": "x" * 50}) for _ in range(3000)]
    for bad in (999, 2400, 2401):
        lines[bad] = "no"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("no\n")
    (tmp_path / "A.txt").write_text("fine")
    table = pyarrow.table({"text": [None if i == 777 else "row" for i in range(1000)]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=100)
    heard = {}
    for processes in (1, 2):
        said = heard[processes] = []
        with pytest.raises(prepare.PrepareError, match=r"^3 bad lines in .*a.jsonl; nothing"):
            prepare.prepare(
                [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"],
                tmp_path / "o.tok",
                processes=processes,
                shard_mb=0.01,
                say=said.append,
            )
        assert [s.split(":")[1] for s in said if "jsonl:" in s] == ["1000", "2401", "2402"]
        assert not (tmp_path / "o.tok").exists()
    kept = "parts are finished and kept in"
    assert kept in heard[1][-1] and kept in heard[2][-1]
    said = []
    with pytest.raises(prepare.PrepareError, match="1 bad line in"):
        prepare.prepare([f"{tmp_path}/c.parquet"], tmp_path / "p.tok", shard_mb=0.0005, say=said.append)
    assert said[0].startswith(f"{tmp_path}/c.parquet:778: 'text' is NoneType")
    # the parts that were finished are taken over where bad lines are skipped
    said = []
    headers = prepare.prepare(
        [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"], tmp_path / "o.tok", skip_bad_lines=True, shard_mb=0.01, say=said.append
    )
    assert headers[0]["documents"] == 2998
    assert "parts are finished; going on" in said[0] and said[-1] == "4 bad lines left out"


def test_killed_and_started_again_gives_the_same_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 80)
    args = ("--input=a.jsonl", "--output=a.tok", "--validation=0.1", "--processes=2", "--shard-mb=0.4")
    process = start(tmp_path, *args)
    wait_for(lambda: len(finished(tmp_path)) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not list(tmp_path.glob("*.tok"))
    done = {p: p.stat().st_mtime_ns for p in finished(tmp_path)}
    assert done
    again = start(tmp_path, *args)
    error = again.communicate(timeout=120)[1]
    assert again.returncode == 0, error
    assert "parts are finished; going on" in error
    assert int(error.split("partial: ")[1].split(" of")[0]) >= len(done)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.tok", "a.val.tok"]
    prepare.prepare([f"{tmp_path}/a.jsonl"], tmp_path / "b.tok", validation=0.1)
    for one, other in (("a.tok", "b.tok"), ("a.val.tok", "b.val.tok")):
        files = [TokenFile.open(tmp_path / name) for name in (one, other)]
        assert files[0].header["content_sha256"] == files[1].header["content_sha256"]
        assert verify(tmp_path / one) == []


def cut_off(folder: Path, monkeypatch, **options) -> list[str]:
    """A run that ends after three parts, as if by Ctrl-C. What it said."""
    made = shards.make_shard

    def stop(job, where, number, *rest):
        if number == 3:
            raise KeyboardInterrupt
        return made(job, where, number, *rest)

    said = []
    monkeypatch.setattr(shards, "make_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare([f"{folder}/a.jsonl"], folder / "a.tok", shard_mb=0.02, say=said.append, **options)
    monkeypatch.setattr(shards, "make_shard", made)
    return said


def swap(path: Path) -> None:
    """In place of a part's file, the whole one of another part."""
    path.write_bytes(path.with_name("000000.tok").read_bytes())


def test_what_differs_starts_afresh_and_says_so(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", 1000)

    def run(**options) -> list[str]:
        said = []
        prepare.prepare([f"{tmp_path}/a.jsonl"], tmp_path / "a.tok", shard_mb=0.02, say=said.append, force=True, **options)
        assert not (tmp_path / "a.tok.partial").exists()
        return said

    (kept,) = cut_off(tmp_path, monkeypatch)
    assert kept.startswith("3 of ") and " parts are finished and kept in " in kept
    assert [f.stem for f in finished(tmp_path)] == ["000000", "000001", "000002"]
    assert "3 of" in run()[0]
    want = texts(tmp_path / "a.tok")
    for options, named in (({"validation": 0.5}, "validation"), ({"text_key": "text,text"}, "text-keys")):
        (tmp_path / "a.tok").unlink()
        cut_off(tmp_path, monkeypatch)
        (said,) = run(**options)
        assert f"left by a run with other {named}; starting afresh" in said
    (tmp_path / "a.tok").unlink()
    cut_off(tmp_path, monkeypatch)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert "other inputs; starting afresh" in run()[0]
    assert texts(tmp_path / "a.tok") == want
    # a part that is not what it was is made again
    for damage in (lambda p: p.with_suffix(".json").unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1]), Path.unlink, swap):
        (tmp_path / "a.tok").unlink()
        cut_off(tmp_path, monkeypatch)
        damage(finished(tmp_path)[1].with_suffix(".tok"))
        assert "2 of" in run()[0]
        assert texts(tmp_path / "a.tok") == want


def test_a_process_that_dies_is_an_error_and_the_rest_is_kept(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 80)
    args = ("--input=a.jsonl", "--output=a.tok", "--processes=2", "--shard-mb=0.4")
    process = start(tmp_path, *args)
    wait_for(lambda: len(finished(tmp_path)) >= 2, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1, error
    assert "was ended by signal 9 (SIGKILL) while it read a.jsonl" in error
    assert "fewer --processes" in error
    assert "finished and kept in a.tok.partial" in error
    assert not list(tmp_path.glob("*.tok"))
    assert finished(tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_keeps_finished_parts_and_no_file(tmp_path, processes):
    write_lines(tmp_path / "a.jsonl", 20_000, 80)
    process = start(tmp_path, "--input=a.jsonl", "--output=a.tok", f"--processes={processes}", "--shard-mb=0.4")
    wait_for(lambda: len(finished(tmp_path)) >= 2, process)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "interrupted; no token file was written" in error
    assert "the same command goes on from there" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.tok.partial"]
    assert not [p for p in workers if Path(f"/proc/{p}").exists()]


def test_a_full_disk_is_an_error_that_leaves_no_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", 20_000, 100)
    # a limit on the size of files stands for the full disk
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21)); "
    program = f"{limit}import sys; from jaxtrain.data.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for shard_mb, left in ((64, ["a.jsonl"]), (1, ["a.jsonl", "a.tok.partial"])):  # in a part, or when parts are merged
        process = start(
            tmp_path, "--input=a.jsonl", "--output=a.tok", f"--shard-mb={shard_mb}", "--processes=1", program=program
        )
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 1, error
        assert "File too large" in error
        assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert main(["prepare", f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/a.tok", "--shard-mb=1", "--processes=1"]) == 0


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_and_cut_off_ones_refused(tmp_path, suffix):
    want = [f"document {i} ü" for i in range(50)]
    data = "".join(json.dumps({"text": t}) + "\n" for t in want).encode()
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(PACK[suffix](data[:300]) + PACK[suffix](data[300:]))  # several streams in one file
    (tmp_path / f"b.txt.{suffix}").write_bytes(PACK[suffix](b"a text\n"))
    prepare.prepare([f"{tmp_path}/*"], tmp_path / "a.tok")
    assert texts(tmp_path / "a.tok") == [*want, "a text\n"]
    path.write_bytes(PACK[suffix](data)[:-9])
    with pytest.raises(prepare.PrepareError, match=r"a\.jsonl\.\w+: cannot be read to its end"):
        prepare.prepare([str(path)], tmp_path / "b.tok")
    path.write_bytes(b"this is not compressed at all, whatever its name says")
    with pytest.raises(prepare.PrepareError, match="cannot be read to its end"):
        prepare.prepare([str(path)], tmp_path / "b.tok")
    path.rename(tmp_path / f"c.parquet.{suffix}")
    with pytest.raises(prepare.PrepareError, match="compressed inside"):
        prepare.prepare([f"{tmp_path}/c*"], tmp_path / "b.tok")


def test_several_columns_are_joined(tmp_path, capsys):
    rows = [{"title": "One", "text": "first", "id": 1}, {"title": "", "text": "second", "id": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("jsonl", "parquet"):
        command = ["prepare", f"--input={tmp_path}/a.{name}", f"--output={tmp_path}/a.tok", "--force"]
        assert main([*command, "--text-key=title,text"]) == 0
        assert texts(tmp_path / "a.tok") == ["One\n\nfirst", "second"]
        assert main([*command, "--text-key=text,title", r"--separator= |\n"]) == 0
        assert texts(tmp_path / "a.tok") == ["first |\nOne", "second"]
        assert main([*command, "--text-key=title,body"]) == 2
        assert "'body'" in capsys.readouterr().err
        assert main([*command, "--text-key=title,id", "--skip-bad-lines"]) == 2
        assert "'id' is int, not text" in capsys.readouterr().err
    assert main([*command, "--text-key=title,"]) == 2
    assert main([*command, "--processes=-1"]) == 2
    assert main([*command, "--shard-mb=0"]) == 2


def test_a_dataset_by_name(tmp_path, monkeypatch, capsys):
    """As far as it goes without a network: a folder that the package reads as it would one of the hub."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with pytest.raises(prepare.PrepareError, match=r"jaxtrain\[hf-datasets\]"):
            prepare.prepare(["hf:some/name"], tmp_path / "a.tok")
    with pytest.raises(datasets_input.DatasetError, match="is written hf:DATASET"):
        datasets_input.parse("hf:a:b:c:d")
    assert datasets_input.parse("hf:a") == ("a", None, "train")
    assert datasets_input.parse("hf:a::test") == ("a", None, "test")
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(3):
        (folder / f"train-{i}.jsonl").write_text("".join(json.dumps({"text": f"{i} {j}", "n": j}) + "\n" for j in range(4)))
    (folder / "test.jsonl").write_text('{"text": "held out", "n": 1}\n')
    spec = f"hf:{folder}"
    (header,) = prepare.prepare([spec], tmp_path / "a.tok")
    assert texts(tmp_path / "a.tok") == [f"{i} {j}" for i in range(3) for j in range(4)]
    assert header["sources"] == [spec]
    prepare.prepare([f"{spec}::test"], tmp_path / "a.tok", force=True)
    assert texts(tmp_path / "a.tok") == ["held out"]
    for wrong, said, options in (
        (spec, "no column 'body'", {"text_key": "body"}),
        (f"{spec}::nothing", "cannot be opened", {}),
        (f"hf:{tmp_path}/none", "cannot be opened", {}),
        (spec, "12 bad lines", {"text_key": "n"}),
    ):
        with pytest.raises(prepare.PrepareError, match=said):
            prepare.prepare([wrong], tmp_path / "b.tok", **options)
