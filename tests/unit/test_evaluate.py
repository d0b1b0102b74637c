"""Held-out loss by hand: the rows that count, an evaluation that a stop request interrupts, and the units of the loss."""

import dataclasses
import itertools
import math
from typing import Any, cast

import helpers
import numpy as np
import pytest
from token_files import random_documents, write_conversations, write_file

from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.step.state import create_state
from jaxtrain.train import evaluate
from jaxtrain.train.initial_state import open_data

ROWS = 8
RUN = helpers.tiny({"train.global_batch": ROWS, "data.seq_len": 16, "model.num_layers": 1})


class Rows:
    """Held-out data whose row i holds the token i. In row 3 only half of the tokens are predicted."""

    def batch(self, step, rows=None):
        numbers = step * ROWS + np.arange(ROWS)
        weights = np.ones((ROWS, 16), np.float32)
        weights[numbers == 3, 8:] = 0
        tokens = np.broadcast_to(numbers[:, None], (ROWS, 16)).astype(np.int32)
        ones = np.ones((ROWS, 16), np.int32)
        return {"tokens": tokens, "targets": tokens, "segments": ones, "positions": ones, "weights": weights}


def step(params, batch):
    """Return (sum of losses, sum of weights, {}) of a batch; the loss of a token is its id."""
    assert (np.asarray(batch["segments"] != 0) | (np.asarray(batch["weights"]) == 0)).all()
    return (np.asarray(batch["tokens"]) * np.asarray(batch["weights"])).sum(), np.asarray(batch["weights"]).sum(), {}


def evaluated(sequences, unwanted=lambda: False):
    made = helpers.program(RUN)
    found = evaluate.evaluate(step, {}, Rows(), made.eval_batch, made.context, sequences, unwanted)
    return found["loss"] if found else None


@pytest.mark.parametrize("sequences", [1, 4, 8, 9, 21])
def test_the_mean_is_over_predicted_tokens_of_so_many_rows(sequences):
    weights = np.where(np.arange(sequences) == 3, 8, 16)
    assert evaluated(sequences) == pytest.approx((np.arange(sequences) * weights).sum() / weights.sum())


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_the_rows_of_named_sets_do_not_depend_on_batches_and_processes(tmp_path, packing):
    """Data sets of text, conversations and a mixture give the same 37 rows, for every batch size and number of processes."""
    text = write_file(tmp_path / "text.tok", random_documents(0, 400, 30))
    chat = write_conversations(tmp_path / "chat.tok", [4 + k % 11 for k in range(300)])
    sets = f"text={text};chat={chat};both={text}=0.7,{chat}=0.3"
    given = {"data.source": str(text), "data.eval_source": sets, "data.packing": packing, "data.seq_len": 16}

    def rows(global_batch: int, accum: int, processes: int) -> dict[str, list[bytes]]:
        how = {"train.global_batch": global_batch, "train.grad_accum": accum, "eval.every_steps": 1}
        size, found = global_batch // accum, {}
        for name, batches in open_data(helpers.tiny(given | how))[1].items():
            assert batches.global_batch == size
            made: dict[int, bytes] = {}
            for step, process in itertools.product(range(-(-37 // size)), range(processes)):
                own = np.arange(process, size, processes)
                batch = batches.batch(step, own)
                for i, row in enumerate(own.tolist()):
                    made[step * size + row] = b"".join(batch[key][i].tobytes() for key in sorted(batch))
            found[name] = [made[row] for row in range(37)]
        return found

    want = rows(8, 1, 1)
    assert list(want) == ["text", "chat", "both"]
    for how in ((8, 4, 1), (16, 2, 2), (48, 16, 3)):
        assert rows(*how) == want, how


@pytest.mark.parametrize("size", [ROWS, 3 * ROWS])
def test_each_sequence_of_a_small_set_counts_once(tmp_path, size):
    """For a file of text, one of conversations, and a mixture in which the first source ends early."""
    text = write_file(tmp_path / "text.tok", [[k // 16 for k in range(5 * 16 + 1)]])
    chat = write_conversations(tmp_path / "chat.tok", [17] * 30, first=100)
    sets = f"text={text};chat={chat};both={text}=0.8,{chat}=0.2"
    run = helpers.tiny({"data.source": str(text), "data.eval_source": sets, "data.seq_len": 16, "model.num_layers": 1})
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch=size))
    made, found = helpers.program(run), {}
    for name, batches in open_data(run)[1].items():
        for sequences in (4, 20, 1000):
            rows: list[int] = []

            def record(params, batch, rows=rows):
                counts = np.asarray(batch["weights"]).any(-1)
                rows += np.asarray(batch["tokens"])[counts, 0].tolist()
                return step(params, batch)

            evaluate.evaluate(record, {}, batches, made.eval_batch, made.context, sequences)
            assert len(rows) == len({*rows}) == batches.distinct(sequences)
            found[name, sequences] = {*rows}
    assert [len(found[name, 4]) for name in ("text", "chat", "both")] == [4, 4, 4]
    assert [len(found[name, 20]) for name in ("text", "chat", "both")] == [5, 20, 9], "0.2 x 20 conversations in the mixture"
    every = {*range(5)}, {*range(100, 130)}
    assert [found[name, 1000] for name in ("text", "chat", "both")] == [*every, every[0] | every[1]]


def test_bits_per_byte_are_of_the_sequences_that_count(tmp_path):
    """Of 5 sequences with 2 bytes a token and 100 with 6, weighted 4 to 1: the first source ends within the set."""
    for name, sequences, size in (("few", 5, 2), ("many", 100, 6)):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.tokenizer_info(tokenizer.ByteTokenizer())) as writer:
            writer.write([1] * (16 * sequences + 1), size * 16 * sequences)
            writer.end_document()
    sets = f"{tmp_path / 'few.tok'}=0.8,{tmp_path / 'many.tok'}=0.2"
    run = helpers.tiny({"data.source": sets, "data.eval_source": sets, "data.seq_len": 16, "data.packing": "none"})
    (batches,) = open_data(run)[1].values()
    for rows, few, many in ((5, 4, 1), (20, 5, 4), (1000, 5, 100)):
        assert batches.distinct(rows) == few + many
        assert batches.bytes_per_token_of(rows) == pytest.approx((2 * few + 6 * many) / (few + many), rel=0.02)


def test_an_evaluation_is_given_up_at_the_next_batch():
    asked = itertools.count()
    assert evaluated(24, lambda: next(asked) >= 2) is None
    assert math.isnan(evaluated(0) or 0.0), "of no rows"


def test_an_own_loss_is_evaluated_beside_the_plain_cross_entropy():
    """On a mesh, with every term that only training adds to its loss."""
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2, "data.source": "synthetic", "model.num_layers": 1, "loss.z_loss": 0.1}
    plain, own = (helpers.program(helpers.tiny(mesh | {"loss.name": name})) for name in ("cross_entropy", "sources:halved"))
    batches = helpers.batches(plain.run.data, plain.eval_batch["tokens"].shape[1])
    params = create_state(plain.definition, plain.tx, plain.state, 0, plain.trained).params
    want, found = (evaluate.evaluate(p.eval_step, params, batches, p.eval_batch, p.context, 5) for p in (plain, own))
    assert want and found and want.keys() == {"loss"}
    assert found == {"loss": want["loss"] / 2, "cross_entropy": pytest.approx(want["loss"], rel=1e-6)}


def test_a_held_out_set_is_the_same_in_another_place(tmp_path):
    """The identity of the sets decides which held-out losses are compared for the best checkpoint."""
    places = [(tmp_path / "a" / "x.tok", 5), (tmp_path / "b" / "y.tok", 5), (tmp_path / "b" / "z.tok", 6)]
    found, services = [], cast(Any, None)
    for path, first in places:
        path.parent.mkdir(exist_ok=True)
        write_file(path, [[first] * 200])
        run = helpers.tiny({"data.source": "synthetic", "data.eval_source": str(path), "data.seq_len": 16})
        found.append(evaluate.HeldOut(helpers.program(run), open_data(run)[1], services).sets)
    assert found[0] == found[1] != found[2]


def test_units():
    assert evaluate.bits_per_byte(2 * math.log(2), 4.0) == 0.5
    assert evaluate.bits_per_byte(1.0, None) is None
    assert evaluate.perplexity(math.log(7)) == pytest.approx(7)
    assert evaluate.perplexity(1e6) == math.inf
