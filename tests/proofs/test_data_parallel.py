"""`prepare` in several processes: the file does not depend on the number of processes."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from token_files import texts, write_lines

from jaxtrain.data import prepare
from jaxtrain.data.tokenfile import verify_file


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


def test_the_file_is_the_same_for_any_number_of_processes_and_size_of_parts(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus)
    made = {}
    for processes, shard_mb in ((1, 64), (1, 0.2), (2, 0.1)):
        out = tmp_path / f"{processes}-{shard_mb}.tok"
        prepare.prepare_corpus(
            ["*.jsonl", "*.parquet", "*.txt", "*.zst"], out, validation=0.2, processes=processes, shard_mb=shard_mb
        )
        made[processes, shard_mb] = [p.read_bytes() for p in (out, prepare.validation_path(out))]
        assert verify_file(out) == ""
    assert all(files == made[1, 64] for files in made.values())
    assert len(texts(tmp_path / "1-64.tok")) + len(texts(tmp_path / "1-64.val.tok")) == 2000 + 3000 + 19 + 300
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.merging*"))
