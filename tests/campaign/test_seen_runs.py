"""`data seen` after real runs, of one process and of four: its answers equal a record of every batch that was read."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from faults import free_port
from token_files import command, random_documents, write_file

from jaxtrain.data import seen
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.train.history import open_history

RECORDED = """
import json, sys
from jaxtrain import main
from jaxtrain.train.position import Positioned
read = Positioned.batch
def batch(self, step, rows=None):
    found = read(self, step, rows)
    if "targets" in found:
        with open(sys.argv[1], "a") as file:
            print(json.dumps([step + 1, None if rows is None else [int(r) for r in rows], found["tokens"].tolist()]), file=file)
    return found
Positioned.batch = batch
sys.exit(main.main(sys.argv[2:]))
"""
# Attempts of a run: its last step, and the settings that it resumes with
ATTEMPTS = (
    (6, {"train__global_batch": 8, "data__source": "a.tok=0.75,b.tok=0.25"}),
    (11, {"train__global_batch": 16, "data__source": "b.tok=0.5,c.tok=0.5", "train__batch_ramp": "8:9"}),
    (15, {"train__global_batch": 24, "data__source": "c.tok=0.3,a.tok=0.3,b.tok=0.4"}),
)


def ranges(file: TokenFile, sequences: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], bool]]:
    """Return each document of a file, and whether all its tokens are in these sequences of 32 tokens, or follow one."""
    begins = [at for at in range(0, len(file.tokens) - 32, 32) if tuple(file.tokens[at : at + 32].tolist()) in sequences]
    read = {at for begin in begins for at in range(begin, begin + 33)}
    bounds = itertools.pairwise(file.doc_offsets[:].tolist())
    return [(tuple(file.tokens[a:b].tolist()), read.issuperset(range(a, b))) for a, b in bounds]


@pytest.mark.parametrize("count", [1, 4])
def test_what_was_seen_is_what_the_steps_were_given(tmp_path: Path, count: int) -> None:
    changes = {"eval.every_steps": 0, "checkpoint.every_steps": 3}
    config = runs.smallest(tmp_path, changes | {"checkpoint.allow_change": "train.global_batch,train.batch_ramp"})
    for number, name in enumerate("abc"):
        write_file(tmp_path / f"{name}.tok", random_documents(number, 150, 40))
    record: dict[int, dict[int, list[int]]] = {}  # step -> row -> tokens
    for last, how in ATTEMPTS:
        how = how | {
            "data__source": ",".join(f"{tmp_path}/{part}" for part in how["data__source"].split(",")),
            "train__steps": last,
        }
        files = [tmp_path / f"record-{last}-{k}" for k in range(count)]
        line = runs.arguments(config, tmp_path / "run", how)
        place = [f"--coordinator=127.0.0.1:{free_port()}", f"--num-processes={count}"] if count > 1 else []
        env = os.environ | {"PYTHONPATH": str(runs.REPO), "JAX_NUM_CPU_DEVICES": str(8 // count), "XLA_FLAGS": runs.QUICKLY}
        children = [
            subprocess.Popen(
                [sys.executable, "-c", RECORDED, str(file), *line, *place, *([f"--process-id={k}"] if place else [])],
                cwd=tmp_path,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for k, file in enumerate(files)
        ]
        for child in children:
            said = child.communicate(timeout=300)[0]
            assert child.returncode == 0, said
        for file in files:
            for step, rows, tokens in map(json.loads, file.read_text().splitlines()):
                if step <= last:  # batches are read ahead
                    record.setdefault(step, {}).update(zip(rows or range(len(tokens)), tokens, strict=True))
    history = open_history(tmp_path / "run")
    assert history.done == 15 and sorted(record) == [*range(1, 16)]
    for step, rows in record.items():
        found = history.step(step)
        size = 8 if step <= 9 else 16 if step <= 11 else 24
        assert sorted(rows) == [row.row for row in found] == [*range(size)]
        for row in found:
            tokens = np.concatenate([history.file(row.source).tokens[first:last] for _, first, last in row.spans])
            assert tokens.tolist() == rows[row.row]
    file = TokenFile.open(tmp_path / "b.tok")
    for document in range(0, 150, 30):
        first, last = (int(at) for at in file.doc_offsets[document : document + 2])
        windows = range(first // 32, (last - 1) // 32 + 1)
        wanted = {tuple(file.tokens[k * 32 : k * 32 + 32].tolist()) for k in windows}
        there = sorted((step, row) for step, rows in record.items() for row, tokens in rows.items() if tuple(tokens) in wanted)
        assert [
            (reading.step, reading.row) for reading in history.find_readings(history.source_of("b.tok"), [(first, last)])[0]
        ] == there
    every = {tuple(tokens) for rows in record.values() for tokens in rows.values()}
    documents = {name: ranges(TokenFile.open(tmp_path / f"{name}.tok"), every) for name in "abc"}
    whole = {ids for found in documents.values() for ids, complete in found if complete}
    equal = seen.measure_overlap(history, file, 15).exact_D.tolist()
    assert equal == [ids in whole for ids, _ in documents["b"]] and 0 < sum(equal) < len(equal)
    for option in (
        "--step=8 --show-text",
        f"--document={tmp_path}/b.tok:3",
        "--text=xyz",
        f"--validation={tmp_path}/a.tok --step=6",
    ):
        code, said = command(tmp_path, "seen", f"--workdir={tmp_path}/run", *option.split())
        assert code == 0 and said
