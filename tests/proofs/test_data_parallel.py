"""`prepare` in several processes: the file and the list of bad lines do not depend on the number of processes."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from token_files import texts, write_lines

from jaxtrain.data import prepare
from jaxtrain.data.tokenfile import verify


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Write a folder with JSON lines, Parquet of several row groups, texts and a compressed file."""
    folder = tmp_path_factory.mktemp("corpus")
    write_lines(folder / "a.jsonl", 2000)
    rows = [f"row {i} " + "of a table " * (i % 30) for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "id": range(3000)}), folder / "b.parquet", row_group_size=500)
    for i in range(20):
        (folder / f"t{i:02}.txt").write_text(f"text {i}\n" * i)
    (folder / "z.jsonl.zst").write_bytes(
        pyarrow.Codec("zstd").compress(write_lines(folder / "z", 300).read_bytes(), asbytes=True)
    )
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
        with pytest.raises(prepare.PrepareError, match=r"^1 bad line in this part of the input; nothing"):
            prepare.prepare(
                [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"],
                tmp_path / "o.tok",
                processes=processes,
                shard_mb=0.01,
                say=said.append,
            )
        assert [s.split(":")[1] for s in said if "jsonl:" in s] == ["1000"]
        assert not (tmp_path / "o.tok").exists()
    kept = "parts are finished and kept in"
    assert kept in heard[1][-1] and kept in heard[2][-1]
    said = []
    with pytest.raises(prepare.PrepareError, match="1 bad line in"):
        prepare.prepare([f"{tmp_path}/c.parquet"], tmp_path / "p.tok", shard_mb=0.0005, say=said.append)
    assert said[0].startswith(f"{tmp_path}/c.parquet:778: 'text' is null")
    # if bad lines are skipped, the finished parts are used again
    said = []
    headers = prepare.prepare(
        [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"], tmp_path / "o.tok", skip_bad_lines=True, shard_mb=0.01, say=said.append
    )
    assert headers[0]["documents"] == 2998
    assert "parts are finished; continuing" in said[0] and said[-1] == "4 bad lines left out"
