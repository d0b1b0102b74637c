"""The campaign's ledger, on hand-made files."""

import ledger
import pytest
from ledger import FAILED, PASSED, SKIPPED, Entry


def entry(item: str, date: str, result: str = PASSED, commit: str = "c1", why: str = "") -> Entry:
    return Entry(item, commit, date, 1.0, result, why)


def test_entries_come_back_and_half_a_line_is_left_out(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    assert ledger.read(path) == []
    made = [entry("a", "1"), entry("b", "2", SKIPPED, why="no GPU")]
    for one in made:
        ledger.append(one, path)
    with open(path, "a") as file:
        file.write('{"item": "c", "comm')
    assert ledger.read(path) == made


def test_a_proof_is_a_pass_of_a_commit_that_no_failure_follows():
    entries = [
        *(entry("a", "1"), entry("a", "3"), entry("a", "4", commit=f"c2{ledger.CHANGED}")),
        *(entry("b", "1"), entry("b", "2", FAILED)),
        *(entry("c", "1", FAILED), entry("c", "2")),
        entry("d", "1", SKIPPED),
    ]
    assert {item: proof.date for item, proof in ledger.proofs(entries).items()} == {"a": "3", "c": "2"}


def test_the_least_proved_come_first():
    groups = {"new": ["a", "b"], "old": ["c", "d"], "older": ["e"], "other": ["f"]}
    known = {item: entry(item, date) for item, date in {"a": "9", "c": "5", "d": "7", "e": "4"}.items()}
    for salt in ("one", "two", "three", "four"):
        found = ledger.order(groups, known, salt)
        assert {*found[:2]} == {"new", "other"} and found[2:] == ["older", "old"], "b and f were never proved"
    orders = {tuple(ledger.order({str(i): [str(i)] for i in range(9)}, {}, salt)) for salt in "abc"}
    assert len(orders) == 3, "where no ledger is kept, each commit begins with other tests"


def test_a_summary_names_what_is_not_proved(monkeypatch):
    ages = {"near": 10, "far": 11, "gone": None}
    monkeypatch.setattr(ledger, "age", ages.__getitem__)
    entries = [
        *(entry("a", "1", commit="near"), entry("b", "1", commit="far"), entry("c", "1", commit="gone")),
        *(entry("d", "1", FAILED), entry("e", "1", SKIPPED, why="no GPU")),
    ]
    first, *rest = ledger.summary(["a", "b", "c", "d", "e", "f"], entries)
    assert first == (
        "ledger: 6 tests, 1 proved in the last 10 commits, 2 before that, 3 never (1 of them failed, 1 were skipped)"
    )
    assert rest == [
        *("  never proved: d", "  never proved: e (skipped: no GPU)", "  never proved: f"),
        *("  last proved more than 10 commits ago: b", "  last proved more than 10 commits ago: c"),
    ]


def test_minutes_of_a_campaign():
    from conftest import minutes

    assert minutes("40") == 40.0
    for text in ("0", "-1", "many", "nan"):
        with pytest.raises(pytest.UsageError, match=f"--campaign={text}"):
            minutes(text)
