"""`data seen` against a record of every batch: each token of the sources is unique, so a batch's tokens say what was read."""

import math
from pathlib import Path

import numpy as np
import pytest
from token_files import BYTE, write_file

from jaxtrain.config import schema
from jaxtrain.data import seen
from jaxtrain.data.batches import open_source
from jaxtrain.data.seen import DataStretch, History, SeenError
from jaxtrain.data.tokenfile import TokenFile

EOT = 256
SKIPPED = range(3, 5)  # batches of each attempt that its steps pass over, as after a divergence
# Attempts of a run: steps, batch size, seq_len, sources and their weights
ATTEMPTS = ((7, 4, 16, "a.tok=0.75,b.tok=0.25"), (9, 6, 16, "b.tok=0.5,c.tok=0.5"), (8, 5, 24, "a.tok=0.3,b.tok=0.4,c.tok=0.3"))


def unique(path: Path, first: int, sizes: list[int], loss: bool = False) -> Path:
    ends = first + np.cumsum(sizes)
    documents = [list(range(end - size, end)) for end, size in zip(ends.tolist(), sizes, strict=True)]
    return write_file(path, documents, loss, vocab_size=1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    rng = np.random.default_rng(5)
    for number, name in enumerate("abc"):
        unique(folder / f"{name}.tok", 1000 * (number + 1), rng.integers(1, 40, 30).tolist())
        unique(folder / f"{name}.chat.tok", 1000 * (number + 1), rng.integers(3, 16, 30).tolist(), loss=True)
    return folder


def run(folder: Path, chat: bool, **keys: object) -> tuple[History, dict[int, list[set[int]]]]:
    """Return the history of a run of ATTEMPTS, and the tokens of each row of each step, without end-of-text."""
    kept, step, tokens = None, 0, 0
    stretches, record = [], {}
    for steps, size, seq_len, source in ATTEMPTS:
        source = ",".join(f"{folder}/{part.replace('.tok', '.chat.tok') if chat else part}" for part in source.split(","))
        data = schema.Data(source=source, seq_len=seq_len, seed=3, **{"max_segments": 32, **keys})  # pyright: ignore[reportArgumentType]
        batches = open_source(data, source, split="train", global_batch=size, data_dir="")
        begin = math.ceil(tokens / seq_len / size)
        batches.start_mixture(kept, step, begin * size)
        read = [begin + k for k in range(steps + len(SKIPPED)) if k not in SKIPPED]
        for number, at in enumerate(read):
            batch = batches.batch(at)
            record[step + number + 1] = [tokens_of(batch, r, packed=chat or data.packing == "best_fit") for r in range(size)]

        def rows(at: int, read: list[int] = read, before: int = step, size: int = size) -> np.ndarray:
            return read[at - 1 - before] * size + np.arange(size)

        skipped = (begin + SKIPPED.start) * size, (begin + SKIPPED.stop) * size
        stretches.append(DataStretch(step + 1, step + steps, rows, data, [skipped]))
        step += steps
        end = (begin + steps + len(SKIPPED)) * size
        tokens = end * seq_len
        kept = {"mixture": batches.mixture.state(end), "tokens": tokens}
    return History(stretches, batches.mixture, done=step - 5), record


def tokens_of(batch: dict[str, np.ndarray], row: int, packed: bool) -> set[int]:
    inside = batch["segments"][row] > 0
    tokens = set(batch["tokens"][row][inside].tolist())
    if packed:  # its last target belongs to the sequence
        tokens |= set(batch["targets"][row][inside & (batch["weights"][row] > 0)].tolist())
    return tokens - {EOT}


CASES = [(False, {}), (False, {"max_segments": 2}), (False, {"packing": "best_fit"}), (True, {})]


@pytest.mark.parametrize(("chat", "keys"), CASES)
def test_the_documents_of_a_step_are_those_of_its_batch(folder, chat, keys):
    history, record = run(folder, chat, **keys)
    for step, rows in record.items():
        found = history.step(step)
        assert [row.row for row in found] == list(range(len(rows)))
        for row, tokens in zip(found, rows, strict=True):
            file, read = history.file(row.source), set()
            for document, first, last in row.spans:
                begin, end = file.doc_offsets[document : document + 2].tolist()
                assert begin <= first < last <= end
                read |= set(file.tokens[first:last].tolist())
            if chat:  # the last token of a sequence is only a target, and only if it counts
                assert tokens <= read - {EOT} and len(read - {EOT} - tokens) <= len(row.spans)
            else:
                assert read - {EOT} == tokens
    for wrong in (0, 25):
        with pytest.raises(SeenError):
            history.step(wrong)


@pytest.mark.parametrize(("chat", "keys"), CASES)
def test_the_steps_of_a_document_are_those_whose_batches_have_it(folder, chat, keys):
    history, record = run(folder, chat, **keys)
    for source in range(3):
        file = history.file(source)
        for document in (0, 7, 29):
            first, last = file.doc_offsets[document : document + 2].tolist()
            tokens = set(file.tokens[first:last].tolist()) - {EOT}
            there = [(step, row) for step, rows in record.items() for row, each in enumerate(rows) if tokens & each]
            # A document's end-of-text may be the only one of its tokens that is an input.
            readings = history.find_readings(source, [(first, last - (not chat and "packing" not in keys))])[0]
            assert [(reading.step, reading.row) for reading in readings] == there
            for reading in readings:
                assert history.step(reading.step)[reading.row].epoch == reading.epoch


@pytest.mark.parametrize(("chat", "keys"), CASES)
@pytest.mark.parametrize("until", [0, 5, 24])
def test_held_out_documents_in_what_was_read(folder, tmp_path, chat, keys, until, monkeypatch):
    history, record = run(folder, chat, **keys)
    monkeypatch.setattr(seen, "CHUNK", 50)
    monkeypatch.setattr(seen, "ROWS", 7)
    ending = ".chat.tok" if chat else ".tok"
    names = [int(Path(each["path"]).name[0], 36) - 10 for each in history.sources]
    files = [TokenFile.open(folder / f"{'abc'[k]}{ending}") for k in names]
    held_out = [files[k].tokens[slice(*files[k].doc_offsets[d : d + 2])].tolist()[:-1] for k in range(3) for d in range(30)]
    held_out += [[1, 2, 3], held_out[4][:3] + [7] * 9 + held_out[5], [5]]
    path = write_file(tmp_path / "held.tok", held_out, loss=chat, vocab_size=1 << 20)
    result = seen.measure_overlap(history, TokenFile.open(path), until, ngram=4)
    covered = [{i for a, b in zip(*history.ranges_read(k, until), strict=True) for i in range(a, b)} for k in range(3)]
    sequences = [tokens for step in range(1, until + 1) for tokens in record[step]]
    inputs = set().union(*sequences)
    read = {token for file, places in zip(files, covered, strict=True) for token in file.tokens[:][sorted(places)].tolist()} - {
        EOT
    }
    assert inputs <= read and len(read - inputs) <= len(sequences) * (4 if chat else 1)  # last targets
    grams, documents = set(), set()
    for file, places in zip(files, covered, strict=True):
        tokens = file.tokens[:].tolist()
        grams |= {tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3) if places.issuperset(range(i, i + 4))}
        bounds = file.doc_offsets[:].tolist()
        documents |= {tuple(tokens[a:b]) for a, b in zip(bounds, bounds[1:], strict=False) if places.issuperset(range(a, b))}
    for ids, equal, share in zip(held_out, result.exact_D.tolist(), result.ngrams_D.tolist(), strict=True):
        own = [tuple([*ids, EOT][i : i + 4]) for i in range(len(ids) - 2)]
        assert equal == ((*ids, EOT) in documents)
        assert share == pytest.approx(sum(gram in grams for gram in own) / len(own)) if own else np.isnan(share)
    assert result.exact_D.any() == (until > 0)


def test_places_of_a_text(tmp_path, monkeypatch):
    texts = ["the sharding of a mesh", "no such words", "a mesh, a mesh", ""]
    path = write_file(tmp_path / "a.tok", [list(text.encode()) for text in texts])
    file = TokenFile.open(path)
    for chunk in (5, 1 << 20):
        monkeypatch.setattr(seen, "CHUNK", chunk)
        documents = [
            int(np.searchsorted(file.doc_offsets[:], first, "right")) - 1
            for first, _ in seen.find_occurrences(file, BYTE, "a mesh")
        ]
        assert documents == [0, 2, 2]
        assert seen.find_occurrences(file, BYTE, "jaxtrain") == []


def test_repeated_text_and_the_edges_of_a_text(tmp_path):
    path = write_file(tmp_path / "a.tok", [[ord("=")] * 100, list(b"0123 WXYZ 56")])
    file = TokenFile.open(path)
    assert seen.find_occurrences(file, BYTE, "=======") == [(k * 7, k * 7 + 7) for k in range(14)]
    assert seen.find_occurrences(file, BYTE, "WXYZ") == [(106, 110)]


@pytest.mark.parametrize("size", [0, 1, 7, 11, 12])
def test_held_out_documents_shorter_than_an_n_gram(folder, tmp_path, size):
    history, _ = run(folder, chat=False)
    path = write_file(tmp_path / "held.tok", [list(range(size))], vocab_size=1 << 20)
    result = seen.measure_overlap(history, TokenFile.open(path), 24, ngram=13)
    assert np.isnan(result.ngrams_D).tolist() == [size < 12] and not result.exact_D.any()


def test_a_name_of_several_files_is_refused(folder, tmp_path, monkeypatch):
    history, _ = run(folder, chat=False)
    write_file(tmp_path / "c.tok", [[1]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SeenError):
        history.source_of("c.tok")  # another file than the run's
    history.sources[1] = {**history.sources[1], "name": "a.tok"}
    with pytest.raises(SeenError):
        history.source_of("a.tok")
    assert history.source_of(f"{folder}/a.tok") == 0


def test_a_file_that_is_gone_or_another_is_named(folder, tmp_path):
    history, _ = run(folder, chat=False)
    source = history.source_of("b.tok")
    assert source == history.source_of(f"{folder}/b.tok") and history.label(source) == "b.tok"
    with pytest.raises(SeenError):
        history.source_of("z.tok")
    for content in ("x", ""):
        history.sources[source] = {**history.sources[source], "content_sha256": content}
        with pytest.raises(SeenError):
            history.file(source)
    history.sources[source] = {**history.sources[source], "content_sha256": "x", "path": f"{tmp_path}/gone.tok"}
    with pytest.raises(SeenError):
        history.step(1)
