"""Changes on resume: each key declares a word. A change is noted, needs allow_change, or is refused."""

import copy
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.config import schema
from jaxtrain.models.rules import DELTA_KEYS
from jaxtrain.step import resume
from jaxtrain.train import initial_state


def test_every_key_says_whether_it_may_change():
    """A setting of the user's own, and a rule of a family's own axis, follow their sections."""
    for name in (*schema.all_keys(), "own.gamma", "sharding.rules.channels"):
        word, reason = schema.resume_of(name)
        assert word in ("free", "ask", "never") and reason, name
    expected = {"own.gamma": "ask", "sharding.rules.channels": "free", "mesh.fsdp": "free", "data.seed": "ask"}
    expected |= {"model.d_model": "never", "model.init_std": "free", "model.sliding_window": "ask", "moe.impl": "free"}
    assert {name: schema.resume_of(name).word for name in expected} == expected


def test_docs_show_the_table():
    page = Path(__file__).parents[2] / "docs/checkpoints.md"
    assert resume.markdown() in page.read_text(), (
        "regenerate it: python -c 'from jaxtrain.step import resume; print(resume.markdown())'"
    )


def tree(**changes: object) -> dict:
    made = schema.default_config()
    with made.unlocked():
        made.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    run, problems = schema.resolve(made)
    assert not problems
    return schema.to_dict(run)


NO_LOSSES = {"moe__balance_loss": 0.0, "moe__z_loss": 0.0}
EXPERTS = {"model__num_experts": 4}
DROPS = EXPERTS | NO_LOSSES | {"moe__capacity_factor": 1.25}
TWO = {"train__grad_accum": 2}
# config before, changes after it, keys that need checkpoint.allow_change
ASKED = {
    "placement, speed, learning rate": ({}, {"mesh__data": 2, "optimizer__lr": 1e-3, "remat__policy": "full"}, ()),
    "rows and batches": ({}, {"data__seq_len": 512, "train__global_batch": 8}, ("data.seq_len", "train.global_batch")),
    "data, model, optimizer": (
        {},
        {"data__seed": 1, "model__sliding_window": 16, "optimizer__weight_decay": 0.0},
        ("data.seed", "model.sliding_window", "optimizer.weight_decay"),
    ),
    # With 0 the data has at most 32 documents a row, so a run with 32 may change to 0. With any other number rows would change.
    "32 documents left open": ({"data__max_segments": 32}, {"data__max_segments": 0}, ()),
    "16 documents left open": ({"data__max_segments": 16}, {"data__max_segments": 0}, ("data.max_segments",)),
    # The losses of experts are computed for each microbatch: another number of microbatches minimizes another function.
    "microbatches": ({}, TWO, ()),
    "microbatches of experts": (EXPERTS, TWO, ("train.grad_accum",)),
    "microbatches, z loss": (EXPERTS | NO_LOSSES | {"moe__z_loss": 0.1}, TWO, ("train.grad_accum",)),
    "microbatches without losses": (EXPERTS | NO_LOSSES, TWO, ()),
    # With a capacity, the dropped tokens depend on which tokens share a device and a microbatch.
    "drops: mesh.data": (DROPS, {"mesh__data": 2}, ("mesh.data",)),
    "drops: microbatches": (DROPS, TWO, ("train.grad_accum",)),
    "drops: sharding.rules.batch": (DROPS, {"sharding__rules__batch": "data+fsdp"}, ("sharding.rules.batch",)),
    "no drops": (EXPERTS | NO_LOSSES, {"mesh__data": 2, "sharding__rules__batch": "data+fsdp"}, ()),
    "drops: no other mesh": (DROPS, {"sharding__zero": 1, "remat__policy": "full"}, ()),
    "drops: context of whole sequences": (DROPS, {"parallel__context": "gather"}, ()),
    "drops: context": (DROPS | {"mesh__seq": 2}, {"parallel__context": "ulysses"}, ("parallel.context",)),
    "a mesh where nothing is dropped any more": (
        DROPS | {"mesh__data": 2},
        {"moe__capacity_factor": 0.0, "mesh__data": 1},
        ("moe.capacity_factor",),
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_change_of_what_is_learnt_is_asked_about(name: str):
    before, changes, keys = ASKED[name]
    notes, problems = resume.compare_configs(tree(**before), tree(**before | changes))
    assert tuple(sorted(p.key for p in problems)) == keys
    assert len(notes) == len(changes) - len(keys)
    allowed = ",".join(sorted(keys))
    notes, left = resume.compare_configs(tree(**before), tree(**before | changes), allowed)
    assert not left and len(notes) == len(changes)
    assert all({*keys} == {*str(p).split("checkpoint.allow_change=")[1].split()[0].split(",")} for p in problems), "to paste"


def refused(before: dict, after: dict, allow: str = "") -> list[str]:
    return [p.key for p in resume.compare_configs(before, after, allow)[1]]


def test_what_can_never_change_is_refused_whatever_is_allowed():
    assert refused(tree(), tree(data__seq_len=512), "data.seq_len, train.*") == []
    assert refused(tree(), tree(train__freeze="head", train__global_batch=8), "train.*") == ["train.freeze"]
    other = tree(model__d_model=64, model__num_layers=2)
    _, problems = resume.compare_configs(tree(), other, "model.num_layers")
    assert [p.key for p in problems] == ["checkpoint.allow_change", "model.num_layers", "model.d_model"]
    assert not any("init.from" in p.remedy for p in problems), "weights of other shapes do not fit"
    [problem] = resume.compare_configs(tree(), tree(optimizer__name="muon"))[1]
    assert "init.from" in problem.remedy
    [problem] = resume.compare_configs(tree(), tree(), "data.seqlen")[1]
    assert "data.seq_len" in str(problem)


@pytest.mark.parametrize(("pattern", "allowed"), [("dgdg", True), ("gd", False), ("dddg", False)])
def test_delta_nets_stay_in_their_layers(pattern, allowed):
    """A pattern may change if each delta net stays in its layer: softmax attention has other weights."""
    sizes = {f"model.{name}": size for name, size in DELTA_KEYS.items()} | {"model.num_layers": 4}
    before, after = (tree(**sizes, **{"model.attention_pattern": name}) for name in ("dg", pattern))
    assert [p.key for p in resume.compare_configs(before, after)[1]] == ["model.attention_pattern"]
    assert (resume.compare_configs(before, after, "model.attention_pattern")[1] == []) is allowed


def test_paths_are_compared_by_content_where_it_is_known():
    """The same content in another place is no change. Other content in the same place is one."""
    one, two = tree(data__tokenizer="a"), tree(data__tokenizer="b/c")
    for now, hashes, keys, count in (
        (two, None, ["data.tokenizer"], 0),
        (two, ("x", "x"), [], 1),
        (one, ("x", "x"), [], 0),
        (one, ("x", "y"), ["data.tokenizer"], 0),
        (two, ("x", "y"), ["data.tokenizer"], 0),
    ):
        contents = {"data.tokenizer": hashes} if hashes else {}
        notes, problems = resume.compare_configs(one, now, "", contents)
        assert ([p.key for p in problems], len(notes)) == (keys, count), (now["data"]["tokenizer"], hashes)
        assert not resume.compare_configs(one, now, "data.tokenizer", contents)[1]


def test_groups_may_change_their_recipe_and_not_their_optimizer():
    """Muon has one moment. A parameter that changes to AdamW would need two."""
    muon = {"optimizer__name": "muon"}
    decay, moved = "*.scale:weight_decay=0", "layers.*:optimizer=adamw"
    for groups, allow, keys in ((decay, "", ["optimizer.groups"]), (decay, "optimizer.groups", [])):
        assert refused(tree(**muon), tree(**muon, optimizer__groups=groups), allow) == keys
    assert refused(tree(**muon), tree(**muon, optimizer__groups=moved), "optimizer.groups") == ["optimizer.groups"]


def test_meshes_that_follow_the_devices_are_asked_about_by_their_sizes():
    """mesh.fsdp=-1 is another layout on another number of devices, and a capacity then drops other tokens."""
    run = schema.resolve(schema.default_config())[0]
    some = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, num_experts=4),
        moe=dataclasses.replace(run.moe, capacity_factor=1.25, balance_loss=0.0, z_loss=0.0),
    )
    for one, asked in ((run, []), (some, ["mesh.fsdp"])):
        meta = {"config": schema.to_dict(one), "mesh": {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}}
        for fsdp, keys in ((8, []), (4, asked)):
            program = SimpleNamespace(placement=SimpleNamespace(mesh=SimpleNamespace(shape=meta["mesh"] | {"fsdp": fsdp})))
            assert [p.key for p in resume.compare_configs(*initial_state._with_meshes(meta, one, program))[1]] == keys


def test_configs_of_other_versions_and_own_axes():
    old = tree()
    del old["model"]["qk_norm"]
    old["model"]["gone"] = 3
    notes, problems = resume.compare_configs(old, tree())
    assert len(notes) == 1 and "model.gone = 3" in notes[0] and not problems
    assert refused(old, tree(model__qk_norm=True)) == ["model.qk_norm"], "a key the old version lacked counts as its default"
    new = tree()
    new["sharding"]["rules"]["channels"] = "tensor"
    notes, problems = resume.compare_configs(tree(), new)
    assert not problems and "sharding.rules.channels" in notes[0]


def test_former_keys_are_noted():
    """A checkpoint of an older version resumes."""
    old = copy.deepcopy(tree())
    old["compiler"]["defaults"] = False
    old["sharding"]["rules"] |= {"kv_heads": "tensor", "layers": "stage", "head_dim": ""}
    notes, problems = resume.compare_configs(old, tree())
    assert not problems
    assert len(notes) == 1 and all(name in notes[0] for name in ("compiler.defaults = False", "sharding.rules.layers"))


@pytest.mark.parametrize(
    ("before", "after", "done", "rates"),
    [
        # A short try, and then the whole run: (1e-3 at its end, its peak).
        (
            {"train.steps": 60, "optimizer.warmup_steps": 4},
            {"train.steps": 700, "optimizer.warmup_steps": 50},
            60,
            (1e-3, 1e-2),
        ),
        ({"optimizer.lr": 1e-2}, {"optimizer.lr": 5e-3}, 300, (1e-2, 5e-3)),
        ({"optimizer.lr": 1e-2}, {"optimizer.lr": 1.05e-2}, 300, None),
        ({"train.steps": 700}, {"train.steps": 1400}, 30, None),  # still in the warm-up
        ({}, {"optimizer.schedule": "cosine"}, 690, (1e-2, 1e-3)),
        ({"optimizer.warmup_steps": 50}, {"optimizer.warmup_steps": 100}, 49, (1e-2, 5e-3)),
        ({"train.steps": 60}, {"train.steps": 60, "optimizer.lr": 1.0}, 60, None),  # no further step
        (
            {},
            {"optimizer.schedule": "linear", "optimizer.lr_min": 0.0, "optimizer.decay_steps": 100},
            690,
            (1e-2, 0.0),
        ),
        ({"optimizer.schedule": "linear", "optimizer.lr_min": 0.0, "train.steps": 60}, {"train.steps": 700}, 60, (0.0, 1e-2)),
    ],
)
def test_a_resumed_run_says_how_the_rate_of_its_next_step_changes(before, after, done, rates):
    def run(changes: dict[str, object]) -> schema.RunConfig:
        tree = schema.to_dict(schema.RunConfig())
        usual = {"train.steps": 700, "optimizer.warmup_steps": 50, "optimizer.schedule": "constant", "optimizer.lr": 1e-2}
        for key, value in (usual | {"optimizer.lr_min": 1e-3} | changes).items():
            section, name = key.split(".")
            tree[section][name] = value
        return schema.resolve(tree)[0]

    was = {"optimizer.schedule": "cosine"} if before.get("train.steps") == 60 else {}
    notes = initial_state.changed_rate(*((r.optimizer, r.train.steps) for r in (run(was | before), run(was | after))), done)
    assert len(notes) == (rates is not None)
    if rates:
        told = [float(number) for number in re.findall(r"[:>] ([\d.e-]+)", notes[0])]
        assert told == pytest.approx(list(rates), rel=0.03) and f"step {done + 1}" in notes[0]
        assert ("times" in notes[0]) == all(rates), "there is no factor from or to 0"
