"""Names of a layer's activations, and the activations that each remat policy saves.

The model marks these tensors with `checkpoint_name`. A tensor that is saved (on the device or the host) for the backward pass
is not recomputed. This module imports no jax, because FLOP counts and config checks import this module.
"""

from jaxtrain.config.schema import Problem, Remat, suggest

# Name of an activation -> its description.
ACTIVATIONS = {
    "attention_norm": "normalised input of the attention block",
    "q_latent": "latent of queries, before its norm (latent attention)",
    "kv_latent": "latent of keys and values before its norm, and the rotary key before rotary (latent attention)",
    "q": "queries, after rotary",
    "k": "keys, after rotary",
    "v": "values",
    "attention_out": "output of the attention kernel",
    "attention_lse": "its log-sum-exp, which the kernel's backward pass needs with the output",
    "attention_gate": "gate of attention_out, before the sigmoid",
    "attention_proj": "attention_out through wo",
    "residual": "residual stream after the attention block",
    "mlp_norm": "normalised input of the feed-forward block",
    "mlp_gate": "gate projection, before the nonlinearity",
    "mlp_up": "up projection",
    "mlp_down": "output of the feed-forward block",
}
# Logical axes of each activation, of a layer's input, and of the tokens that are sent to experts. The mlp_gate and mlp_up of
# experts have no logical axes: their rows are the tokens that were sent to a device.
AXES: dict[str, tuple[str | None, ...]] = {
    "layer_input": ("batch", "residual", None),
    "attention_norm": ("batch", "residual", None),
    "q_latent": ("batch", "sequence", None),
    "kv_latent": ("batch", "sequence", None),
    "q": ("batch", "sequence", "heads", None),
    "k": ("batch", "sequence", "kv_heads", None),
    "v": ("batch", "sequence", "kv_heads", None),
    "attention_out": ("batch", "sequence", "heads", None),
    "attention_lse": ("batch", "heads", "sequence"),
    "attention_gate": ("batch", "sequence", "heads", None),
    "attention_proj": ("batch", "residual", None),
    "residual": ("batch", "residual", None),
    "mlp_norm": ("batch", "residual", None),
    "expert_choice": ("batch", "sequence", None),
    "mlp_gate": ("batch", "sequence", "mlp"),
    "mlp_up": ("batch", "sequence", "mlp"),
    "mlp_down": ("batch", "residual", None),
}
ACTIONS = ("keep", "offload", "recompute")

GEMM_OUTPUTS = ("q", "k", "v", "attention_gate", "attention_proj", "mlp_gate", "mlp_up", "mlp_down")

LATENTS = ("q_latent", "kv_latent")  # only in multi-head latent attention

# Policy -> the activations that it saves. "none" also saves activations without a name, but no gathered weights. remat.tensors
# lists the activations of "custom".
SAVED = {
    "none": tuple(ACTIVATIONS),
    "full": (),
    "dots": (*LATENTS, *GEMM_OUTPUTS),
    "attention": (*LATENTS, "q", "k", "v", "attention_out", "attention_lse", "attention_gate"),
    # Results of matmuls and attention calls; fewer if they do not fit (auto_remat.py).
    "auto": (*LATENTS, "q", "k", "v", "attention_out", "attention_lse", "attention_gate", "residual", "mlp_gate", "mlp_up"),
}


def parse_tensors(text: str) -> tuple[dict[str, str], list[Problem]]:
    """Return `remat.tensors` ("q=keep,mlp_up=offload") as activation -> keep | offload | recompute, and its problems."""
    actions: dict[str, str] = {}
    problems = []
    for item in filter(None, (entry.strip() for entry in text.split(","))):
        name, equals, action = item.partition("=")
        if not equals:
            problems.append(
                Problem("remat.tensors", item, "must be NAME=keep, NAME=offload or NAME=recompute", f"For example {name}=keep.")
            )
        elif name not in ACTIVATIONS:
            problems.append(
                Problem("remat.tensors", item, f"no activation is named {name!r}", suggest(name, list(ACTIVATIONS)))
            )
        elif action not in ACTIONS:
            problems.append(
                Problem("remat.tensors", item, f"{action!r} is not keep, offload or recompute", suggest(action, list(ACTIONS)))
            )
        elif name in actions:
            problems.append(Problem("remat.tensors", item, f"{name!r} is named twice", "Keep one of them."))
        else:
            actions[name] = action
    return actions, problems


def saved_activations(remat: Remat) -> frozenset[str]:
    """Return the activations that the policy saves for the backward pass, on the device or on the host.

    For policy "auto", return all activations that it may save.
    """
    if remat.policy == "custom":
        actions, _ = parse_tensors(remat.tensors)
        return frozenset(name for name, action in actions.items() if action != "recompute")
    return frozenset(SAVED[remat.policy])
