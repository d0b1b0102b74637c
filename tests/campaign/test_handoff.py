"""Exported folders load in programs that serve, evaluate and convert models, with these programs' own loaders, on a CPU."""

import dataclasses
import json
import sysconfig
from pathlib import Path
from typing import Any

import hugging_face
import jax
import numpy as np
import pytest
from hugging_face import FAMILIES, exported, imported

from jaxtrain import lm_eval
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.generation import Sampler
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import alone, read_params
from jaxtrain.models import family
from jaxtrain.sharding import make_placement

SCRIPTS = Path(__file__).resolve().parents[1] / "reference"
TEXT = "def f(x):"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return family -> exported folder of a small model with the byte tokenizer."""
    hugging_face.reference()
    out = {}
    for name in FAMILIES:
        place = tmp_path_factory.mktemp(name)
        _, ours, _ = imported(place, name, vocab=264)
        out[name] = place / "served"
        exported(ours, out[name], tokenizer="byte")
    return out


def answers(script: str, *args: Any) -> list[Any]:
    """Return the JSON lines that a script prints, run by the Python that has transformers."""
    lines = hugging_face.ask(SCRIPTS / script, *args).splitlines()
    return [json.loads(line) for line in lines if line.startswith(("{", "["))]


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of jaxtrain's own generation, in float32, on all devices."""
    source, devices = open_origin(str(folder)), jax.devices()
    run = source.run()
    run = alone(dataclasses.replace(run, precision="f32", dtypes=dataclasses.replace(run.dtypes, params="f32")), devices)
    sampler = Sampler(run, make_placement(run, devices[: run.mesh.fsdp]))
    params = read_params(source, run, sampler.definition, sampler.placement)
    return list(sampler.tokens(params, prompt, max_tokens=count, temperature=0.0, top_p=1.0, seed=0))


def test_servers_open_every_family(served):
    """AutoConfig, AutoTokenizer and AutoModelForCausalLM, with which vLLM opens models, open each export.

    No tensor is unexpected. Token ids, chat template and greedy tokens equal jaxtrain's.
    """
    tokenizer = ByteTokenizer()
    for (name, folder), found in zip(served.items(), answers("auto_classes.py", TEXT, *served.values()), strict=True):
        architecture = family(open_folder(folder).model.family).FORMAT.architecture
        assert found["architectures"] == [architecture] and found["class"] == architecture, name
        assert (found["dtype"], found["unexpected"]) == ("torch.float32", []), name
        assert (found["ids"], found["decoded"], found["eos"]) == (tokenizer.encode(TEXT), TEXT, tokenizer.eot), name
        assert found["chat"] == f"### user\n{TEXT}\n\n### assistant\n", name
        assert greedy(folder, found["ids"], len(found["made"])) == found["made"], name


def test_the_harness_scores_alike_from_the_run_and_from_its_export(served, tmp_path):
    """lm-evaluation-harness gives equal log-likelihoods for the run (jaxtrain's model) and its export (transformers)."""
    from lm_eval.api.instance import Instance

    pairs = [[TEXT, " return x"], ["a b c", " d"], ["", "hello"]]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    folder = served["qwen3"]
    (theirs,) = answers("lm_eval_scores.py", sysconfig.get_path("purelib"), folder, tmp_path / "pairs.json")
    run = folder.parent / "ours"
    model = lm_eval.harness_model()(workdir=str(run), tokenizer=str(folder))
    ours = model.loglikelihood([Instance("loglikelihood", {}, (a, b), 0) for a, b in pairs])
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    np.testing.assert_allclose([score for score, _ in ours], [score for score, _ in theirs], rtol=1e-4)


# Gemma 2 needs a SentencePiece tokenizer.model, which a run on bytes lacks. For the other two llama.cpp splits tensors: gate
# and up of all GPT-OSS experts, and the keys and values of a latent.
OTHERWISE = ("gemma2", "gpt_oss", "deepseek_v3")


def test_llama_cpp_converts_families_with_equal_tensors(served, tmp_path):
    """In the output of llama.cpp's converter, every tensor has the export's numbers, and the metadata has its sizes.

    In llama.cpp's architecture `llama`, the weights of queries and keys have these numbers in another, interleaved order.
    """
    source = Path(hugging_face.reference()).parents[1] / "llama"
    if not source.exists():
        pytest.skip(f"no llama.cpp in {source}: tests/reference/setup.sh fetches it")
    folders = {name: folder for name, folder in served.items() if name not in OTHERWISE}
    for (name, folder), found in zip(folders.items(), answers("to_gguf.py", source, *folders.values()), strict=True):
        model, meta = open_folder(folder).model, found["meta"]
        kind = meta["general.architecture"]
        interleaved = 2 * model.num_layers if kind == "llama" else 0
        assert not found["different"] and len(found["permuted"]) == interleaved, (name, found)
        assert len(found["equal"]) + interleaved == len(open_folder(folder).tensors), name
        assert all("q_proj" in x or "k_proj" in x for x in found["permuted"]), name
        sizes = {
            "block_count": model.num_layers,
            "embedding_length": model.d_model,
            "attention.head_count": model.num_heads,
            "attention.head_count_kv": model.num_kv_heads,
            "rope.freq_base": model.rope_base,
        }
        assert {key: meta[f"{kind}.{key}"] for key in sizes} == sizes, name
