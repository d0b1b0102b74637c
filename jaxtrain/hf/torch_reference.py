"""Compute what a Hugging Face folder computes, by transformers in float32 on a CPU: logits, activations and gradients.

`torch_reference.py DIR OUT`: OUT has tokens.npy, int [B, T], and norms.json, the names of the modules whose inputs are wanted,
in the order of the model. Their inputs must be the residual stream. The program writes to OUT

    logits.npy           [B, T, V]
    states.npy           the inputs, [B, norms, T, D]
    cotangents.npy       the gradients with respect to the inputs, [B, norms, T, D]
    weights/NAME.npy     the gradient of the parameter NAME; a parameter without gradient has none

The loss is the mean cross entropy of tokens.npy rolled by one: after the last token of a row comes its first. A tied head is
untied, so that head and embedding have separate gradients. Without norms, logits alone are computed.

Of a model that also sees or hears, text is computed, and the names are those of its text part by itself.

This program is separate: it imports nothing from jaxtrain, and runs in any Python that has transformers and torch. Rows are
computed one by one, and a weight's gradient is freed when it is written. So memory holds the weights, the largest gradient and
the activations of one row; OUT holds one gradient of all weights.
"""

import json
import sys
from pathlib import Path


def main():
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    folder, out = sys.argv[1], Path(sys.argv[2])
    norms = json.loads((out / "norms.json").read_text(encoding="utf-8"))
    torch.set_grad_enabled(bool(norms))
    # sdpa would be wrong for some models: its kernels have no soft cap, and transformers only warns about that.
    kind = transformers.AutoModelForCausalLM
    settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if settings.get("text_config"):
        kind = getattr(transformers, settings["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    modules = {name for name, _ in model.named_modules()}
    prefix = next((f"{name}." for name in ("model.language_model", "model.text_model") if name in modules), "model.")
    head = model.get_output_embeddings()
    if norms and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    rows = torch.from_numpy(np.load(out / "tokens.npy").astype(np.int64))
    inputs = {}

    def watch(name):
        model.get_submodule(name.replace("model.", prefix, 1)).register_forward_pre_hook(
            lambda _, args: inputs.update({name: args[0]})
        )

    def save_gradient(name, parameter):
        def write_gradient(_):
            file = out / "weights" / f"{name}.npy"
            np.save(file, parameter.grad.numpy() + (np.load(file) if file.exists() else 0))
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(write_gradient)

    (out / "weights").mkdir()
    for name in norms:
        watch(name)
    for name, parameter in model.named_parameters() if norms else ():
        save_gradient("model." + name.removeprefix(prefix) if name.startswith(prefix) else name, parameter)
    outputs = {"logits": [], "states": [], "cotangents": []}
    for row in rows:
        logits = model(row[None], use_cache=False).logits.float()
        outputs["logits"].append(logits[0].detach().numpy())
        if norms:
            states = [inputs[name] for name in norms]
            for state in states:
                state.retain_grad()
            loss = torch.nn.functional.cross_entropy(logits[0], row.roll(-1), reduction="sum") / rows.numel()
            loss.backward()
            outputs["states"].append(np.stack([state[0].detach().numpy() for state in states]))
            outputs["cotangents"].append(np.stack([state.grad[0].numpy() for state in states]))
    for name, arrays in outputs.items():
        if arrays:
            np.save(out / f"{name}.npy", np.stack(arrays))


if __name__ == "__main__":
    main()
