"""Rows of conversations at the lengths of two published sets: padding, whole conversations, equal rows in any process.

recorded/conversation_lengths.json has 401 quantiles of the number of tokens in a conversation, with their sources: requests and
answers of a service (Azure), and HH-RLHF's conversations by a byte-level BPE of 2,500 tokens.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from token_files import BYTE

from jaxtrain import config
from jaxtrain.data import pipeline, windows
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.tokenfile import TokenWriter

SETS = json.loads((Path(__file__).parents[1] / "recorded/conversation_lengths.json").read_text())
END = 1 << 20  # an id above the numbers of all conversations


def write(path: Path, lengths: list[int]) -> Path:
    """Write conversations: k is repeated, then END. The second half of each conversation counts in the loss."""
    with TokenWriter(path, {**tokenizers.info(BYTE), "vocab_size": END + 1, "eot": END}, loss=True) as writer:
        for k, n in enumerate(lengths):
            writer.write(np.full(n - 1, k), n, np.arange(n - 1) >= n // 2, n)
            writer.end_document(loss=True)
    return path


def drawn(which: dict, count: int) -> list[int]:
    return np.random.default_rng(0).choice(which["quantiles"], count).tolist()


@pytest.mark.parametrize("seq_len", [4096, 8192])
@pytest.mark.parametrize("which", SETS, ids=lambda which: which["name"].split()[0])
def test_padding_and_whole_conversations(tmp_path: Path, which: dict, seq_len: int) -> None:
    """By default padding is below 3%. Each conversation that fits into a row is in one row once, and its answer follows its
    whole prompt.
    """
    lengths = drawn(which, which["conversations"])
    source = write(tmp_path / "a.tok", lengths)
    data = config.Data(source=str(source), seq_len=seq_len)
    batches = pipeline.open_source(data, data.source, split="train", global_batch=8, data_dir="")
    (packed,) = batches.sources
    assert isinstance(packed, windows.PackedRows)
    fits = [n <= seq_len + 1 for n in lengths]
    assert batches.truncated[0] == fits.count(False)
    padding, met, tokens = 0, [], 0
    for first in range(0, packed.windows, 64):
        batch = windows.make_batch(*packed.rows(np.arange(first, min(first + 64, packed.windows))), True, batches.max_segments)
        padding += int((batch["segments"] == 0).sum())
        tokens += batch["tokens"].size
        for token, segment, weight, position in zip(
            *(batch[k] for k in ("tokens", "segments", "weights", "positions")), strict=True
        ):
            for number in range(1, int(segment.max()) + 1):
                own = np.flatnonzero(segment == number)
                k = int(token[own[0]])
                met.append(k)
                # A document's last target may be the row's last target, which is no input.
                assert (token[own[:-1]] == k).all() and (position[own] == np.arange(len(own))).all()
                if fits[k]:
                    assert lengths[k] - 1 <= len(own) <= lengths[k]
                    assert np.flatnonzero(weight[own])[0] == lengths[k] // 2 - 1  # the target after the prompt's last token
    assert sorted(met) == [k for k in range(len(lengths)) if fits[k] or lengths[k] // 2 <= seq_len]
    longer = batches.truncated[0]
    print(f"{which['name']}, {seq_len}: {len(lengths)} conversations, {longer} longer, {padding / tokens:.2%} padding")
    assert padding / tokens < 0.03


ROWS = """
import hashlib, json, sys
import numpy as np
from jaxtrain import config
from jaxtrain.data import pipeline
source, schedule, count, number, first, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
data = config.Data(source=source, source_schedule=schedule, seq_len=1024)
batches = pipeline.open_source(data, source, split="train", global_batch=8, data_dir="")
rows = np.arange(number, 8, count)
for step in range(first, last):
    batch = batches.batch(step, rows)
    for i, row in enumerate(rows.tolist()):
        made = hashlib.sha256(b"".join(np.ascontiguousarray(batch[k][i]).tobytes() for k in sorted(batch))).hexdigest()
        print(json.dumps([step, row, made]))
"""


def test_rows_are_the_same_in_any_number_of_processes_and_after_a_resume(tmp_path: Path) -> None:
    """One, two and four real processes read their rows of 12 batches, and two processes also start at step 5. The mixture
    changes at step 6.
    """
    for k, which in enumerate(SETS):
        write(tmp_path / f"{k}.tok", [min(n, 1500) for n in drawn(which, 400)])
    source, schedule = f"{tmp_path}/0.tok=0.5,{tmp_path}/1.tok=0.5", f"6: {tmp_path}/0.tok=0.2,{tmp_path}/1.tok=0.8"

    def made(count: int, first: int = 0) -> dict[tuple[int, int], str]:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", ROWS, source, schedule, *map(str, (count, number, first, 12))],
                stdout=subprocess.PIPE,
                text=True,
                cwd=runs.REPO,
            )
            for number in range(count)
        ]
        said = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0] * count
        lines = [json.loads(line) for line in itertools.chain(*(text.splitlines() for text in said))]
        return {(step, row): digest for step, row, digest in lines}

    whole = made(1)
    assert len(whole) == 96 and len(set(whole.values())) == 96
    assert made(2) == whole and made(4) == whole
    assert made(2, 5) == {key: digest for key, digest in whole.items() if key[0] >= 5}


def test_fifty_conversations_train_with_the_defaults(tmp_path: Path) -> None:
    """`data prepare --chat` and a run from the command line, with the default config: a short last row is padded."""
    talk = [{"role": "user", "content": "What is {}?"}, {"role": "assistant", "content": "It is {}, of course."}]
    rows = [{"messages": [m | {"content": m["content"].format(k)} for m in talk]} for k in range(50)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=600, check=False, cwd=runs.REPO
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    command("jaxtrain.data", "prepare", "--chat", f"--input={tmp_path}/talk.jsonl", f"--output={tmp_path}/talk.tok")
    said = command(
        *("jaxtrain.main", f"--workdir={tmp_path}/run", f"--config.data.source={tmp_path}/talk.tok"),
        *("--config.eval.every_steps=0", "--config.train.steps=3", "--config.log.every_steps=1"),
    )
    assert "data: up to 2 documents in a sequence" in said, said
    lines = [line for line in runs.lines(tmp_path / "run") if line["kind"] == "train"]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 3 and np.isfinite(losses).all() and min(losses[1:]) < losses[0]
    assert lines[-1]["epoch"] > 1, "a batch has more sequences than there are, and they come again"
