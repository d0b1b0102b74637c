"""Text, tables and compressed files to token files: bad lines, finished parts that are kept, and refused commands."""

import bz2
import gzip
import json
import lzma
import os
import re
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import BYTE, command, finished, poke, texts, write_lines

from jaxtrain.data import documents, prepare, tokenfile
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.rows import TextRows
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify_file


@pytest.mark.parametrize("pattern", ["**/*.txt", "all.jsonl", "all.parquet"])
def test_prepare_reads_every_format_alike(tmp_path, monkeypatch, pattern):
    documents = [f"Document {i}: " + "naïve café " * (i % 7 + 1) + "\n" for i in range(40)]
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(documents):
        (tmp_path / "txt" / f"{i:03}.txt").write_text(text)
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in documents))
    pyarrow.parquet.write_table(pyarrow.table({"body": documents}), tmp_path / "all.parquet", row_group_size=7)
    monkeypatch.chdir(tmp_path)
    (header,) = prepare.prepare_corpus([pattern], Path("out.tok"), text_key="body")
    assert texts(Path("out.tok")) == documents
    assert header["source_bytes"] == sum(len(d.encode()) for d in documents)
    assert verify_file("out.tok") == ""
    prepare.prepare_corpus([pattern], Path("split.tok"), text_key="body", validation=0.3)
    train, validation = texts(Path("split.tok")), texts(Path("split.val.tok"))
    assert sorted(train + validation) == sorted(documents)
    assert 3 < len(validation) < 25


def test_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.documents.PIECE_BYTES", 50)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 100)
    for name, text in (("lines", "zwölf Boxkämpfer\n" * 40), ("one line", "ü€𝄞" * 333), ("exact", "y" * 50)):
        (tmp_path / "a.txt").write_text(text)
        prepare.prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True)
        assert texts(tmp_path / "a.tok") == [text], name
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 40 + b"bad \xff byte\n")
    said = []
    with pytest.raises(prepare.PrepareError):
        prepare.prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True, say=said.append)
    assert [line.rpartition(": ")[0] for line in said] == [f"{tmp_path}/a.txt:41"]


def test_bad_lines_with_one_reason_are_told_once(tmp_path):
    """The reason, and its hint, stand beside the numbers of its lines; 20 lines are named in all."""
    talk = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})
    (tmp_path / "a.jsonl").write_text("\n".join([*[talk] * 3, '{"text": 1}', *[talk] * 30]))
    code, out = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok")
    told = re.findall(r"a.jsonl:([\d, ]+): ", out)
    assert code == 2 and [[int(n) for n in lines.split(", ")] for lines in told] == [[1, 2, 3, *range(5, 21)], [4]]
    assert out.count("--chat") == 1 and "34" in out.splitlines()[-1]
    for shard in ("--shard-mb=1", "--shard-mb=0.0005"):  # in one part, and in many
        _, out = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok", "--skip-bad-lines", shard)
        assert sum(len(lines.split(", ")) for lines in re.findall(r"a.jsonl:([\d, ]+): ", out)) == 20


def test_bad_lines_are_named_counted_and_stop(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": 3}', b"", b"not json", b'{"x": "y"}', b"\xff", b"[1]", b'{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "two"}']))
    code, out = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok")
    assert code == 2 and re.findall(r"a.jsonl:(\d+): ", out) == ["2", "4", "5", "6", "7", "8"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    code, out = command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok", "--skip-bad-lines")
    assert code == 0 and "6 bad lines" in out and texts(tmp_path / "a.tok") == ["one", "two"]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "n.parquet")
    code, out = command(tmp_path, "prepare", "--input=n.parquet", "--output=b.tok")
    assert code == 2 and "n.parquet:2: " in out


def test_commands_that_are_wrong_exit_2_and_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n")
    (tmp_path / "old.tok").write_text("mine")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-20])
    (tmp_path / "fake.parquet").write_text("no parquet")
    (tmp_path / "t.json").write_text("{}")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # fails at once, without five attempts
    for named, *args in (
        ("none*", "--input=none*"),
        (".tok", "--input=a.txt", "--output=b.bin"),
        ("old.tok", "--input=a.txt", "--output=old.tok"),
        ("nowhere.json", "--input=a.txt", "--tokenizer=nowhere.json"),
        ("no/such", "--input=a.txt", "--tokenizer=hf:no/such"),
        ("256", "--input=a.txt", "--eot=</s>"),
        ("--format=jsonl", "--input=t.json"),
        ("cut.jsonl.gz", "--input=cut.jsonl.gz"),
        ("fake.parquet", "--input=fake.parquet"),
        ("b.val.tok", "--input=a.txt", "--validation=0.001"),  # would hold no document
        ("--validation", "--input=a.txt", "--validation=1.5"),
        ("--processes", "--input=a.txt", "--processes=-1"),
        ("--shard-mb", "--input=a.txt", "--shard-mb=1e305"),
    ):
        output = [] if any(arg.startswith("--output") for arg in args) else ["--output=b.tok"]
        code, out = command(tmp_path, "prepare", *args, *output)
        assert code == 2 and named in out, (args, out)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, args
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=old.tok", "--force")[0] == 0
    assert texts(tmp_path / "old.tok") == ["some text\n"]


@pytest.mark.parametrize("documents", [2, 30, 300])
def test_a_share_without_held_out_documents_is_answered_with_one_that_has_some(tmp_path, documents):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "the text of document {i}"}}\n' for i in range(documents)))
    line = ["prepare", "--input=a.jsonl", "--output=a.tok"]
    code, out = command(tmp_path, *line, "--validation=1e-9")
    (fix,) = re.findall(r"Fix: (--validation=[\d.]+)", out)
    assert code == 2 and command(tmp_path, *line, fix)[0] == 0
    assert 0 < TokenFile.open(tmp_path / "a.val.tok").header["documents"] < documents


def test_verify_and_show_commands(tmp_path):
    (tmp_path / "a.txt").write_text("hello there\n")
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")[0] == 0
    assert command(tmp_path, "verify", "a.tok")[0] == 0
    code, out = command(tmp_path, "show", "a.tok", "--documents=1")
    assert code == 0 and "hello there" in out and "13 tokens" in out
    data = bytearray((tmp_path / "a.tok").read_bytes())
    data[70] ^= 1
    (tmp_path / "b.tok").write_bytes(data)
    code, out = command(tmp_path, "verify", "a.tok", "b.tok")
    assert code == 1 and out.count("b.tok: ") == 1
    code, out = command(tmp_path, "verify", "b.tok", "gone.tok")
    assert code == 2 and "gone.tok: " in out and "b.tok" not in out, "all paths are checked before a file is read"
    assert command(tmp_path, "show", "c.tok")[0] == command(tmp_path, "polish")[0] == 2


def test_two_writers_of_one_output_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with prepare.shards_folder(tmp_path / "a.tok"):
        assert command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")[0] == 2
    info = text_tokenizers.tokenizer_info(BYTE)
    with TokenWriter(tmp_path / "a.tok", info), pytest.raises(tokenfile.TokenFileError):
        TokenWriter(tmp_path / "a.tok", info)
    assert texts(tmp_path / "a.tok") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tok", "a.txt"]


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.documents.PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1 << 15)
    line = json.dumps({"text": "x" * 900}) + "\n"
    peaks = []
    for count in (2_000, 8_000):
        (tmp_path / "a.jsonl").write_text(line * count)
        (tmp_path / "a.txt").write_text(line * count)
        tracemalloc.start()
        prepare.prepare_corpus([f"{tmp_path}/a.*"], tmp_path / "out.tok", force=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] and peaks[1] < (tmp_path / "a.jsonl").stat().st_size / 3, peaks


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["", "{}", "x", '{"text": "a"}', '{"text": "b\\nü"}', "ü" * 9]), max_size=12), st.integers(1, 60)
)
def test_parts_of_a_file_are_its_lines_once_each_with_their_numbers(tmp_path_factory, lines, part_bytes):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text("\n".join(lines))
    said, parts = [], []
    for size in (1 << 30, part_bytes):
        report, pieces = documents.Report(), []
        for cut in documents.cut_file(path, "jsonl", size):
            pieces += [p.text for p in documents.read_pieces(cut, TextRows(["text"], ""), report)]
        said.append(report.lines)
        parts.append(pieces)
    assert parts[0] == parts[1] == [json.loads(line)["text"] for line in lines if line.startswith('{"')]
    assert said[0] == said[1]
    assert [number for _, number, _ in said[0]] == [i for i, line in enumerate(lines, 1) if line and '"' not in line]


def test_finished_parts_are_kept_and_what_differs_starts_afresh(tmp_path, monkeypatch):
    """The command is interrupted after three parts, as by Ctrl-C, and repeated."""
    source, made = write_lines(tmp_path / "a.jsonl", 300), prepare.make_shard

    def stop(task, *rest):
        if task.files[0].stem == "000003":
            raise KeyboardInterrupt
        return made(task, *rest)

    def run(**options) -> list[str]:
        said = []
        prepare.prepare_corpus([str(source)], tmp_path / "a.tok", shard_mb=0.02, say=said.append, force=True, **options)
        return said

    def swap(path: Path) -> None:
        path.write_bytes(path.with_name("000000.tok").read_bytes())

    def kept(damage=None, age=False, **options) -> str:
        """Return how many parts the second command has kept ("" if none)."""
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(prepare, "make_shard", stop)
            run()
        assert [f.stem for f in finished(tmp_path)] == ["000000", "000001", "000002"]
        if damage:
            damage(finished(tmp_path)[1])
        if age:
            os.utime(source, (1, 1))
        said = run(**options)
        assert not (tmp_path / "a.tok.partial").exists()
        return "".join(re.findall(r"(\d+) of", said[0]))

    assert kept() == "3"
    want = texts(tmp_path / "a.tok")
    assert kept(validation=0.5) == kept(text_key="text,text") == ""
    assert kept(age=True) == "" and texts(tmp_path / "a.tok") == want
    # a part that has changed is prepared again
    cut, flipped = (lambda p: p.write_bytes(p.read_bytes()[:-1])), (lambda p: poke(p, 70, p.read_bytes()[70] ^ 1))
    for damage in (cut, flipped, Path.unlink, swap):
        assert kept(damage) == "2" and texts(tmp_path / "a.tok") == want


@pytest.mark.parametrize("more", [1, 40])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, more):
    source, output, make = write_lines(tmp_path / "in.jsonl", 300), tmp_path / "a.tok", prepare.make_shard

    def change(*args):
        report = make(*args)
        if not changed:
            changed.append(source.write_text(f'{{"text":{" " * more}' + before.removeprefix('{"text":')))
            os.utime(source, (1, 1))
        return report

    changed: list[int] = []
    before = source.read_text()
    monkeypatch.setattr(prepare, "make_shard", change)
    with pytest.raises(prepare.PrepareError, match="in.jsonl"):
        prepare.prepare_corpus([str(source)], output, processes=1, shard_mb=0.005, skip_bad_lines=True)
    assert not output.exists()
    prepare.prepare_corpus([str(source)], output, processes=1, shard_mb=0.005)
    assert texts(output) == [json.loads(line)["text"] for line in before.splitlines()]


def test_parts_with_bad_lines_are_kept_by_a_command_that_refuses_them(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", 100)
    source.write_text(source.read_text() + "bad\n")

    def run(skip):
        prepare.prepare_corpus([str(source)], tmp_path / "a.tok", processes=1, shard_mb=0.005, skip_bad_lines=skip)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TokenWriter, "append", stop_now)
        run(skip=True)
    before = [(path, path.stat().st_mtime_ns) for path in finished(tmp_path)]
    with pytest.raises(prepare.PrepareError):
        run(skip=False)
    assert [(path, path.stat().st_mtime_ns) for path in finished(tmp_path)] == before and len(before) > 2
    run(skip=True)
    assert len(texts(tmp_path / "a.tok")) == 100


def stop_now(*_: object) -> None:
    raise KeyboardInterrupt


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
    prepare.prepare_corpus([f"{tmp_path}/*"], tmp_path / "a.tok")
    assert texts(tmp_path / "a.tok") == [*want, "a text\n"]
    for wrong in (PACK[suffix](data)[:-9], b"this is not compressed at all, whatever its name says"):
        path.write_bytes(wrong)
        with pytest.raises(prepare.PrepareError, match=r"a\.jsonl\.\w+: "):
            prepare.prepare_corpus([str(path)], tmp_path / "b.tok")
    path.rename(tmp_path / f"c.parquet.{suffix}")
    with pytest.raises(prepare.PrepareError, match=r"c\.parquet\.\w+"):
        prepare.prepare_corpus([f"{tmp_path}/c*"], tmp_path / "b.tok")


def test_several_columns_are_joined(tmp_path):
    rows = [{"title": "One", "text": "first", "id": 1}, {"title": "", "text": "second", "id": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("jsonl", "parquet"):
        for keys, want in (
            (["--text-key=title,text"], ["One\n\nfirst", "second"]),
            (["--text-key=text,title", r"--separator= |\n"], ["first |\nOne", "second"]),
        ):
            assert command(tmp_path, "prepare", f"--input=a.{name}", "--output=a.tok", "--force", *keys)[0] == 0
            assert texts(tmp_path / "a.tok") == want
        for keys, named in (("title,body", "'body'"), ("title,id", "'id'"), ("title,", "--text-key")):
            how = ("prepare", f"--input=a.{name}", "--output=b.tok", "--skip-bad-lines")
            code, out = command(tmp_path, *how, f"--text-key={keys}")
            assert code == 2 and named in out


def test_a_dataset_by_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with pytest.raises(prepare.PrepareError, match="--extra hf-datasets"):
            prepare.prepare_corpus(["hf:some/name"], tmp_path / "a.tok")
    with pytest.raises(prepare.PrepareError, match="hf:DATASET"):
        documents.dataset_name("hf:a:b:c:d")
    assert documents.dataset_name("hf:a") == ("a", None, "train")
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"  # in place of a data set of the hub
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one", "n": 0}\n{"text": "two", "n": 1}\n')
    (folder / "test.jsonl").write_text('{"text": "held out", "n": 1}\n')
    spec = f"hf:{folder}"
    (header,) = prepare.prepare_corpus([spec], tmp_path / "a.tok")
    assert texts(tmp_path / "a.tok") == ["one", "two"]
    assert header["sources"] == [spec]
    prepare.prepare_corpus([f"{spec}::test"], tmp_path / "a.tok", force=True)
    assert texts(tmp_path / "a.tok") == ["held out"]
    for wrong, named, key in ((spec, "'body'", "body"), (f"{spec}::nothing", "nothing", "text"), (spec, "2 bad lines", "n")):
        with pytest.raises(prepare.PrepareError, match=named):
            prepare.prepare_corpus([wrong], tmp_path / "b.tok", text_key=key)
