"""Text, tables and compressed files to token files: bad lines, finished parts that are kept, and refused commands."""

import bz2
import gzip
import json
import lzma
import os
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import BYTE, command, finished, texts, write_lines

from jaxtrain.data import prepare, readers, tokenfile
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.rows import TextRows
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify


def make_corpus(folder: Path, count: int = 40) -> list[str]:
    """Write the same documents as text, JSON lines (plain and gzip) and Parquet."""
    documents = [f"Document {i}: " + "naïve café " * (i % 7 + 1) + "\n" for i in range(count)]
    (folder / "txt").mkdir()
    for i, text in enumerate(documents):
        (folder / "txt" / f"{i:03}.txt").write_text(text)
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(documents))
    (folder / "all.jsonl").write_text(lines)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"id": list(range(count)), "body": documents})
    pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)
    return documents


@pytest.mark.parametrize("pattern", ["txt/*.txt", "**/*.txt", "all.jsonl", "all.jsonl.gz", "all.parquet"])
def test_prepare_reads_every_format_alike(tmp_path, monkeypatch, pattern):
    documents = make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    (header,) = prepare.prepare([pattern], Path("out.tok"), text_key="body")
    assert texts(Path("out.tok")) == documents
    assert header["source_bytes"] == sum(len(d.encode()) for d in documents)
    assert verify("out.tok") == []
    prepare.prepare([pattern], Path("split.tok"), text_key="body", validation=0.3)
    train, validation = texts(Path("split.tok")), texts(Path("split.val.tok"))
    assert sorted(train + validation) == sorted(documents)
    assert 3 < len(validation) < 25
    prepare.prepare([pattern], Path("again.tok"), text_key="body", validation=0.3)
    assert Path("again.val.tok").read_bytes() == Path("split.val.tok").read_bytes()


def test_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 50)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 100)
    for name, text in (("lines", "zwölf Boxkämpfer\n" * 40), ("one line", "ü€𝄞" * 333), ("short", "x"), ("exact", "y" * 50)):
        (tmp_path / "a.txt").write_text(text)
        prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True)
        assert texts(tmp_path / "a.tok") == [text], name
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 40 + b"bad \xff byte\n")
    said = []
    with pytest.raises(prepare.PrepareError):
        prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True, say=said.append)
    assert said == [f"{tmp_path}/a.txt:41: not UTF-8 (invalid start byte, byte 0xff)"]


def test_bad_lines_are_named_counted_and_stop(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": 3}', b"", b"not json", b'{"x": "y"}', b"\xff", b"[1]", b'{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "two"}']))
    done = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok")
    assert done[0] == 2
    for number in (2, 4, 5, 6, 7, 8):
        assert f"a.jsonl:{number}: " in done[1]
    assert "6 bad lines in this part of the input; nothing was written" in done[1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    done = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok", "--skip-bad-lines")
    assert done[0] == 0, done[1]
    assert "6 bad lines left out" in done[1]
    assert texts(tmp_path / "a.tok") == ["one", "two"]
    (tmp_path / "many.jsonl").write_bytes(b"{\n" * 50)
    done = command(tmp_path, "prepare", "--input=many.jsonl", "--output=b.tok")
    assert done[1].count("many.jsonl:") == prepare.SHOWN
    assert "50 bad lines" in done[1]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "n.parquet")
    done = command(tmp_path, "prepare", "--input=n.parquet", "--output=b.tok")
    assert (done[0], "n.parquet:2: 'text' is null" in done[1]) == (2, True)


def test_commands_that_are_wrong_exit_2_and_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n")
    (tmp_path / "old.tok").write_text("mine")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-20])
    (tmp_path / "fake.parquet").write_text("no parquet")
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "a.csv").write_text("text\nsome text\n")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for said, *args in (
        ("matches no file", "--input=none*", "--output=b.tok"),
        ("is a folder", "--input=.", "--output=b.tok"),
        ("ends in .tok", "--input=a.txt", "--output=b.bin"),
        ("old.tok exists", "--input=a.txt", "--output=old.tok"),
        ("cannot read nowhere.json", "--input=a.txt", "--output=b.tok", "--tokenizer=nowhere.json"),
        ("not a tokenizer.json", "--input=a.txt", "--output=b.tok", "--tokenizer=t.json"),
        ("could not be fetched", "--input=a.txt", "--output=b.tok", "--tokenizer=hf:no/such"),
        ("id 256 ends", "--input=a.txt", "--output=b.tok", "--eot=</s>"),
        ("--format=jsonl", "--input=t.json", "--output=b.tok"),
        ("read_csv('a.csv'), 'a.parquet')", "--input=a.csv", "--output=b.tok"),
        ("--ouput: no such option. Did you mean --output?", "--input=a.txt", "--ouput=b.tok"),
        ("already a token file", "--input=old.tok", "--output=b.tok"),
        ("cannot be read to its end", "--input=cut.jsonl.gz", "--output=b.tok"),
        ("not readable as Parquet", "--input=fake.parquet", "--output=b.tok"),
        ("would hold no document", "--input=a.txt", "--output=b.tok", "--validation=0.001"),
        ("less than 1", "--input=a.txt", "--output=b.tok", "--validation=1.5"),
    ):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # fails at once, without five attempts
        done = command(tmp_path, "prepare", *args)
        assert done[0] == 2, (args, done)
        assert said in done[1], (args, done)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, args
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=old.tok", "--force")[0] == 0
    assert texts(tmp_path / "old.tok") == ["some text\n"]


def test_verify_and_show_commands(tmp_path):
    (tmp_path / "a.txt").write_text("hello there\n")
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")[0] == 0
    code, out = command(tmp_path, "verify", "a.tok")
    assert (code, "intact" in out) == (0, True)
    code, out = command(tmp_path, "show", "a.tok", "--documents=1")
    assert (code, "hello there" in out) == (0, True)
    assert "13 tokens (uint16), 1 document, 12 bytes" in out
    data = bytearray((tmp_path / "a.tok").read_bytes())
    data[70] ^= 1
    (tmp_path / "b.tok").write_bytes(data)
    code, out = command(tmp_path, "verify", "a.tok", "b.tok")
    assert code == 1
    assert "a.tok" in out and "b.tok: block 0" in out
    assert command(tmp_path, "show", "c.tok")[0] == 2
    assert command(tmp_path, "polish")[0] == 2
    assert command(tmp_path, "prepare", "--help")[0] == 0


def test_verify_refuses_what_is_no_file(tmp_path, capsys):
    """verify checks all paths before it reads a file, and exits with 2 at a wrong path. Exit code 1 is reserved for damage."""
    (tmp_path / "damaged.tok").write_bytes(b"damaged")
    for name, rule in (("gone.tok", "no such file"), (".", "is a folder")):
        path = tmp_path / name
        assert main(["verify", str(tmp_path / "damaged.tok"), str(path)]) == 2
        said = capsys.readouterr()
        assert f"{path}: {rule}" in said.err and said.out == ""


def test_two_writers_of_one_output_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with prepare.parts_folder(tmp_path / "a.tok", {}, print):
        code, out = command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")
        assert (code, "another process is writing it" in out) == (2, True)
    with (
        TokenWriter(tmp_path / "a.tok", text_tokenizers.info(BYTE)),
        pytest.raises(tokenfile.TokenFileError, match="writing it"),
    ):
        TokenWriter(tmp_path / "a.tok", text_tokenizers.info(BYTE))
    assert texts(tmp_path / "a.tok") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tok", "a.txt"]


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 1 << 17)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1 << 17)
    line = json.dumps({"text": "x" * 900}) + "\n"
    peaks = []
    for count in (2_000, 20_000):
        (tmp_path / "a.jsonl").write_text(line * count)
        (tmp_path / "a.txt").write_text(line * count)
        tracemalloc.start()
        prepare.prepare([f"{tmp_path}/a.*"], tmp_path / "out.tok", force=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0], peaks
    assert peaks[1] < (tmp_path / "a.jsonl").stat().st_size / 3, peaks


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


def test_several_processes_name_the_same_bad_lines_and_make_the_same_file(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", 600).read_text().splitlines()
    good = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok", "--shard-mb=0.02", "--processes=2")
    for number in (100, 101, 400):
        lines[number - 1] = "{"
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    write_lines(tmp_path / "c.jsonl", 100)
    found = []
    for processes in (1, 2):
        (tmp_path / "b.tok").unlink(missing_ok=True)
        arguments = ("prepare", "--input=[bc].jsonl", "--output=b.tok", "--shard-mb=0.02", f"--processes={processes}")
        refused = command(tmp_path, *arguments)
        skipped = command(tmp_path, *arguments, "--skip-bad-lines")
        found.append((refused[0], skipped[0], [line for line in refused[1].splitlines() if "parts are" not in line]))
        found[-1] += (TokenFile.open(tmp_path / "b.tok").header["content_sha256"],)
    assert good[0] == 0 and found[0] == found[1]
    assert found[0][:2] == (2, 0)
    assert [line.split(":")[1] for line in found[0][2][:2]] == ["100", "101"]
    assert len(texts(tmp_path / "b.tok")) == 600 - 3 + 100 and len(texts(tmp_path / "a.tok")) == 600


def cut_off(folder: Path, monkeypatch, **options) -> list[str]:
    """Interrupt prepare after three parts, as by Ctrl-C, and return its messages."""
    made = prepare.make_part

    def stop(job, where, number, *rest):
        if number == 3:
            raise KeyboardInterrupt
        return made(job, where, number, *rest)

    said = []
    monkeypatch.setattr(prepare, "make_part", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare([f"{folder}/a.jsonl"], folder / "a.tok", shard_mb=0.02, say=said.append, **options)
    monkeypatch.setattr(prepare, "make_part", made)
    return said


def swap(path: Path) -> None:
    """Replace a part's file with the complete file of another part."""
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
    for options in ({"validation": 0.5}, {"text_key": "text,text"}):
        (tmp_path / "a.tok").unlink()
        cut_off(tmp_path, monkeypatch)
        (said,) = run(**options)
        assert "left by a run with other inputs or options; starting again" in said
    (tmp_path / "a.tok").unlink()
    cut_off(tmp_path, monkeypatch)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert "other inputs or options; starting again" in run()[0]
    assert texts(tmp_path / "a.tok") == want
    # a part that has changed is prepared again
    for damage in (lambda p: p.with_suffix(".json").unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1]), Path.unlink, swap):
        (tmp_path / "a.tok").unlink()
        cut_off(tmp_path, monkeypatch)
        damage(finished(tmp_path)[1].with_suffix(".tok"))
        assert "2 of" in run()[0]
        assert texts(tmp_path / "a.tok") == want


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_and_cut_off_ones_refused(tmp_path, suffix):
    want = [f"document {i} ü" for i in range(50)]
    data = "".join(json.dumps({"text": t}) + "\n" for t in want).encode()
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(PACK[suffix](data[:300]) + PACK[suffix](data[300:]))  # several compressed streams in one file
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
        assert main([*command, "--text-key=text,title", "--separator="]) == 0
        assert texts(tmp_path / "a.tok") == ["firstOne", "second"]
        assert main([*command, "--text-key=title,body"]) == 2
        assert "'body'" in capsys.readouterr().err
        assert main([*command, "--text-key=title,id", "--skip-bad-lines"]) == 2
        assert "'id' is a number, not text" in capsys.readouterr().err
    assert main([*command, "--text-key=title,"]) == 2
    assert main([*command, "--processes=-1"]) == 2
    for number in ("0", "nan", "inf", "1e305"):
        capsys.readouterr()
        assert main([*command, f"--shard-mb={number}"]) == 2
        assert "must be a finite number above 0" in capsys.readouterr().err


def test_a_dataset_by_name(tmp_path, monkeypatch, capsys):
    """The test needs no network: a local folder takes the place of the hub's data set."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with pytest.raises(prepare.PrepareError, match=r"pip install .* -r pyproject\.toml --extra hf-datasets"):
            prepare.prepare(["hf:some/name"], tmp_path / "a.tok")
    with pytest.raises(prepare.PrepareError, match="is written hf:DATASET"):
        readers.dataset_name("hf:a:b:c:d")
    assert readers.dataset_name("hf:a") == ("a", None, "train")
    assert readers.dataset_name("hf:a::test") == ("a", None, "test")
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
        (spec, "4 bad lines", {"text_key": "n"}),
    ):
        with pytest.raises(prepare.PrepareError, match=said):
            prepare.prepare([wrong], tmp_path / "b.tok", **options)
