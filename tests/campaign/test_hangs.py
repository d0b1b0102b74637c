"""A step, a data source and a save that never end: exit 124, and a folder that says which it was."""

import json
import re
from pathlib import Path

import pytest
import runs
from faults import Faults, Figures

OWN = """
import os
import threading
import time

import jax
import jax.numpy as jnp
from jaxtrain.data import pipeline
from jaxtrain.loss import cross_entropy

HOW = os.environ.get("HANGS", "")


class Source:
    def __init__(self, batches):
        self.batches = batches

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        if HOW == "data" and step == 7:
            time.sleep(1000)
        return self.batches.batch(step, rows)


def source(data, split, global_batch):
    if HOW == "save":  # a file system on which nothing reaches the disk any more
        here, sync = threading.current_thread, os.fsync
        os.fsync = lambda handle: time.sleep(1000) if here().name.startswith("checkpoint") else sync(handle)
    return Source(pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir=""))


def loss(hidden_BTD, head_VD, batch, spec):
    made = [0]

    def slow(x):
        made[0] += 1
        if HOW == "step" and made[0] > 4:
            time.sleep(1000)
        return x

    nothing = jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), batch["weights"][0, 0])
    return cross_entropy(hidden_BTD, head_VD, batch, spec) + jax.lax.stop_gradient(0 * nothing)
"""

CAUSES = {
    "step": "no step finished within 8 s (train.timeouts: step=8)",
    "data": "waiting for data for 8 s (train.timeouts: data=8)",
    "save": "the save of step 5 has not finished after 8 s (train.timeouts: checkpoint=8)",
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how == "step" else pytest.mark.more) for how in CAUSES])
def test_a_hang_ends_with_124_and_says_what_hung(how: str, tmp_path: Path, figures: Figures) -> None:
    faults = Faults(tmp_path, OWN, data__source="own:source", loss__name="own:loss", train__steps=4000)
    workdir = tmp_path / "run"
    limits = {"train__timeouts": "step=8,data=8,checkpoint=8", "paths__cache": ""}  # host calls are never cached
    code, said = faults.start(workdir, env={"HANGS": how}, **limits).end(timeout=90)
    assert code == 124, said
    [folder] = workdir.glob("hang-*")
    cause = (folder / "cause.txt").read_text().strip()
    assert cause == CAUSES[how]
    assert f"the run hangs and is ended: {cause}" in said and str(folder) in said
    report = json.loads((folder / "report.json").read_text())
    assert report["facts"]["last_steps_heard_of"] and "device_memory" in report["facts"]
    assert report["facts"]["pending_save"] == (5 if how == "save" else None)
    assert "MainThread" in (folder / "stacks.txt").read_text()
    receipt = runs.receipt(workdir)
    assert receipt["exit_code"] == 124 and receipt["reason"] == cause
    figures.add(f"hang in a {how}", exit_code=code, cause=cause)
    if how != "save":  # what was saved before it stands
        assert (5 in runs.steps(workdir)) == (how == "data")


def test_a_slow_step_is_explained(tmp_path: Path) -> None:
    own = OWN.replace("time.sleep(1000)\n        return self.batches", "time.sleep(1)\n        return self.batches")
    own = own.replace("step == 7", "step == 40")
    faults = Faults(tmp_path, own, data__source="own:source", train__steps=44, checkpoint__every_steps=0)
    code, said = faults.start(tmp_path / "run", env={"HANGS": "data"}).end()
    assert code == 0, said
    found = re.search(r"step 4\d took (\S+) s, usually (\S+) s: data (\S+) s", said)
    assert found, said
    took, usually, data = map(float, found.groups())
    assert usually < took and data > 0.9 * took, "prefetched batches hide a part of the second, not the cause"
