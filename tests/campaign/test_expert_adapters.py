"""Adapters of experts in PEFT: exports that PEFT loads, and adapters that PEFT made, with the same logits in both."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import hugging_face
import jax
import numpy as np
import packages
import pytest
import runs
from hugging_face import TOKENS, exported
from safetensors.numpy import load_file, save_file

from jaxtrain.commands import hf as command
from jaxtrain.config import schema
from jaxtrain.config.schema import to_dict
from jaxtrain.hf import peft
from jaxtrain.hf.importing import open_origin, write_run_folder
from jaxtrain.hf.lora import comparable_settings, digest
from jaxtrain.hf.model import abstract_state, logits_function, place_model, read_params
from jaxtrain.hf.names import PREFIX
from jaxtrain.models.lora import is_adapter
from jaxtrain.step.state import abstract_tensors

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "reference"
SEGMENTS = np.ones_like(TOKENS)
SAME = 2e-4  # of logits, absolute; those of adapters differ from the base's by more than 0.01
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoeshared")
RANK, ALPHA = 3, 5.0


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Hugging Face folder of each family."""
    packages.reference()
    folder = tmp_path_factory.mktemp("bases")
    for name in FAMILIES:
        hugging_face.write(folder / name, name, scale=0.3, vocab=264)
    return folder


def adapters(base: Path, out: Path, **settings: object) -> Path:
    """Write a checkpoint of random adapters beside `base`, as a run does. settings: of lora."""
    source = open_origin(str(base))
    tree = to_dict(dataclasses.replace(source.run(), init=schema.Init(str(base))))
    tree["model"]["mtp_layers"] = 0
    tree["lora"] = {"rank": RANK, "alpha": ALPHA, "targets": "", **settings}
    run, problems = schema.resolve(tree)
    assert not problems
    plain = dataclasses.replace(run, lora=schema.Lora())
    wanted = abstract_tensors(abstract_state(*place_model(run)))
    rng = np.random.default_rng(0)
    made = {
        k: rng.normal(0, 0.1, a.shape).astype(np.float32) for k, a in wanted.items() if k.startswith(PREFIX) and is_adapter(k)
    }
    meta = {"base": {"path": str(base), "digest": digest(read_params(source, plain, *place_model(plain)))}}
    write_run_folder(
        out, to_dict(run), jax.tree.map(jax.numpy.asarray, made), meta | {"text": source.text().record(), "positions": 64}
    )
    return out


def logits(path: Path) -> np.ndarray:
    return logits_function(open_origin(str(path)))(TOKENS, SEGMENTS)


def by_peft(folder: Path, given: dict[str, tuple[Path, Path]]) -> dict[str, dict[str, np.ndarray]]:
    """Return PEFT's logits of each base with its adapter, and of both merged. given: (base, adapter) by a name."""
    np.save(folder / "tokens.npy", TOKENS)
    outs = {name: folder / f"{name}.npz" for name in given}
    triples = [x for name, pair in given.items() for x in (*pair, outs[name])]
    hugging_face.ask(REFERENCE / "peft_logits.py", folder / "tokens.npy", *triples)
    return {name: dict(np.load(out)) for name, out in outs.items()}


WAYS = {
    "each": {},
    "shared": {"experts": "shared"},
    "rslora": {"rslora": True},
    "some": {"targets": "wo,up"},
    "down": {"targets": "down", "experts": "shared"},
    "none": {"experts": "none"},
}
GIVEN = {f"{name}-{way}": (name, way) for name in FAMILIES for way in WAYS if way in ("each", "shared", "rslora")}
GIVEN |= {f"gpt_oss-{way}": ("gpt_oss", way) for way in ("some", "down")}
GIVEN |= {f"deepseek_v3-{way}": ("deepseek_v3", way) for way in ("down", "none")}


def test_peft_computes_the_same(bases, tmp_path):
    """PEFT's logits of exported adapters are jaxtrain's, beside the base and merged, and so are those of a new import."""
    pairs = {}
    for case, (name, way) in GIVEN.items():
        run = adapters(bases / name, tmp_path / case / "run", **WAYS[way])
        assert command.main(["export-adapter", str(run), f"--out={tmp_path / case / 'peft'}"]) == 0
        pairs[case] = bases / name, tmp_path / case / "peft"
    theirs = by_peft(tmp_path, pairs)
    for case, (base, adapter) in pairs.items():
        ours, plain, again = logits(tmp_path / case / "run"), logits(base), tmp_path / case / "again"
        exported(tmp_path / case / "run", tmp_path / case / "merged")
        assert command.main(["import-adapter", str(adapter), f"--base={base}", f"--out={again}"]) == 0
        off = {"beside": ours - theirs[case]["logits"], "merged": logits(tmp_path / case / "merged") - theirs[case]["merged"]}
        off |= {"again": logits(again) - theirs[case]["logits"]}
        assert np.abs(plain - ours).max() > 0.01, case
        assert all(np.abs(x).max() < SAME for x in off.values()), (case, {k: np.abs(x).max() for k, x in off.items()})
        before, after = (open_origin(str(tmp_path / case / x)) for x in ("run", "again"))
        lora = after.run().lora
        if GIVEN[case][1] in ("each", "rslora", "none"):
            assert comparable_settings(lora) == comparable_settings(before.run().lora), case
            read = peft.read_adapter(adapter, before.run().model)[1]
            stored = before.read({k: a for k, a in before.stored.items() if k.startswith(PREFIX)})
            assert read.keys() == stored.keys() and all(np.array_equal(read[k], stored[k]) for k in read), case


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MADE = {
    "qwen3_moe": {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH, "use_rslora": True},
    "gpt_oss": {"target_modules": [], "target_parameters": BOTH},
    "mixtral": {"target_modules": ["v_proj"], "target_parameters": BOTH[:1]},
    "deepseek_v3": {"target_modules": ["kv_b_proj"], "target_parameters": ["down_proj", "mlp.down_proj.weight"]},
}
MADE["deepseek_v3"]["target_parameters"] += ["shared_experts.down_proj.weight"]
# The names of a module of each expert in transformers 4.
MODULES = {"qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def in_modules(run: Path, out: Path, name: str, base: Path) -> Path:
    """Write the adapters of a run's experts as PEFT did with transformers 4, where each expert has modules of its own."""
    source, (block, *called) = open_origin(str(run)), MODULES[name]
    stored = source.read({k: a for k, a in source.stored.items() if k.startswith(PREFIX)})
    tensors = {}
    for i in range(source.run().model.num_layers):
        for weight, theirs in zip(("gate", "up", "down"), called, strict=True):
            a, b = (np.asarray(stored[f"params.layers.{i}.mlp.lora.{weight}_{half}"]) for half in "ab")
            for e in range(len(a)):
                module = f"base_model.model.model.layers.{i}.{block}.experts.{e}.{theirs}"
                tensors |= {f"{module}.lora_A.weight": a[e].T.copy(), f"{module}.lora_B.weight": b[e].T.copy()}
    out.mkdir(parents=True)
    save_file(tensors, out / peft.TENSORS, {"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK}
    settings |= {"lora_alpha": ALPHA, "target_modules": called, "lora_dropout": 0.0, "bias": "none"}
    (out / peft.CONFIG).write_text(json.dumps(settings))
    return out


def test_adapters_of_peft_are_read(bases, tmp_path):
    """Logits of imported adapters are PEFT's: those that PEFT made for parameters, and those for a module of each expert."""
    pairs = {}
    for name, settings in MADE.items():
        (tmp_path / "settings.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA} | settings))
        made = tmp_path / name / "peft"
        hugging_face.ask(REFERENCE / "peft_training.py", "make", bases / name, made, tmp_path / "settings.json")
        pairs[name] = bases / name, made
    for name in MODULES:
        run = adapters(bases / name, tmp_path / f"{name}-modules" / "run", targets="gate,up,down")
        pairs[f"{name}-modules"] = bases / name, in_modules(run, tmp_path / f"{name}-modules" / "peft", name, bases / name)
    for case, (base, adapter) in pairs.items():
        args = ["import-adapter", str(adapter), f"--base={base}", f"--out={tmp_path / case / 'ours'}"]
        assert command.main(args) == 0, case
    theirs = by_peft(tmp_path, pairs)
    for case, (base, _) in pairs.items():
        ours = logits(tmp_path / case / "ours")
        assert np.abs(logits(base) - ours).max() > 0.01, case
        assert np.abs(ours - theirs[case]["logits"]).max() < SAME, case
    assert open_origin(str(tmp_path / "qwen3_moe" / "ours")).run().lora.rslora
    # One expert's module is missing.
    adapter = pairs["mixtral-modules"][1]
    tensors = load_file(adapter / peft.TENSORS)
    save_file({k: x for k, x in tensors.items() if ".1.block_sparse_moe.experts.2.w3." not in k}, adapter / peft.TENSORS)
    assert command.main(["import-adapter", str(adapter), f"--base={bases / 'mixtral'}", f"--out={tmp_path / 'x'}"]) != 0


@pytest.mark.parametrize("experts", ["each", "shared"])
def test_a_run_resumes_to_the_bit_and_passes_check(bases, tmp_path, experts):
    """Processes that train adapters of experts, in one run or in two. `check` passes for them against the merged export."""
    keys = {"data.source": "synthetic", "data.seq_len": 64, "train.global_batch": 8, "paths.cache": "", "optimizer.lr": 0.02}
    keys |= {"optimizer.warmup_steps": 1, "optimizer.schedule": "constant", "eval.every_steps": 0, "sample.max_tokens": 0}
    keys |= {"mesh.fsdp": 4, "mesh.expert": 2, "lora.experts": experts, "precision": "f32", "moe.balance_loss": 0.0}
    base = bases / "qwen3_moe"

    def train(workdir: Path, steps: int) -> None:
        args = [f"--config={ROOT / 'configs' / 'finetune.py'}:base={base},lora=3", f"--workdir={workdir}"]
        args += [f"--config.{k}={v}" for k, v in {**keys, "train.steps": steps}.items()]
        ended = subprocess.run([sys.executable, "-m", "jaxtrain.main", *args], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr

    for workdir, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        train(tmp_path / workdir, steps)
    one, two = (runs.tensors(tmp_path / name) for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert np.abs(one["params.layers.0.mlp.lora.down_b"]).max() > 0
    exported(tmp_path / "whole", tmp_path / "merged")
    args = [str(tmp_path / "whole"), str(tmp_path / "merged"), f"--python={packages.reference()}", f"--base={base}"]
    assert command.main(["check", *args]) == 0
