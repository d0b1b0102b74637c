"""Convert Hugging Face folders by llama.cpp's own converter: `python to_gguf.py LLAMA_CPP DIR...` writes DIR/model.gguf in f32.

It prints a line of JSON for each: the file's metadata, and a comparison of its tensors with those of the folder.

LLAMA_CPP is the source of llama.cpp. Its converter identifies a vocabulary's pre-tokenizer by a hash of published tokenizers,
and refuses others. jaxtrain's byte tokenizer has no merges, so every pre-tokenizer gives the same ids.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

source, *folders = sys.argv[1:]
sys.path[:0] = [source, str(Path(source) / "gguf-py")]

import gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

known = TextModel.get_vocab_base_pre


def get_vocab_base_pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"


def compared(folder):
    """Return metadata, and for each tensor of the folder: equal, permuted (the same numbers in another order), or different."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith(("GGUF", "tokenizer."))}
    there = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == meta["general.architecture"])
    names = gguf.get_tensor_name_map(kind, 128)
    found = {"equal": [], "permuted": [], "different": []}
    for name, x in sorted(load_file(folder / "model.safetensors").items()):
        if ".experts." in name:  # the converter stores all experts in one tensor
            stem, _, rest = name.partition(".experts.")
            number, _, matrix = rest.partition(".")
            y = there[names.get_name(f"{stem}.experts.{matrix}", (".weight",))][int(number)]
        else:
            y = there[names.get_name(name, (".weight", ".bias"))]
        x = x[: len(y)]  # the converter leaves out rows of the embedding without a token
        y = y - 1 if "norm" in name and meta["general.architecture"].startswith("gemma") else y
        same = x.shape == y.shape and np.allclose(x, y, rtol=0, atol=2e-7)
        order = same or np.array_equal(np.sort(x, axis=None), np.sort(y, axis=None))
        found["equal" if same else "permuted" if order else "different"].append(name)
    return {"meta": {k: v for k, v in meta.items() if isinstance(v, int | float | str)}, **found}


TextModel.get_vocab_base_pre = get_vocab_base_pre
for folder in folders:
    sys.argv = ["convert_hf_to_gguf.py", folder, f"--outfile={folder}/model.gguf", "--outtype=f32"]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")
for folder in folders:
    print(json.dumps(compared(Path(folder))))
