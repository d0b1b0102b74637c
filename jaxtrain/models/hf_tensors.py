"""The tables of a family's tensors in Hugging Face checkpoints: their names and axes, and those of jaxtrain. Imports no jax."""

import dataclasses
import re
from collections.abc import Mapping

# Axis -> keys of config.Model whose sum is its size.
AXES = {
    "V": ["vocab_size"],
    "D": ["d_model"],
    "Y": ["d_model"],
    "F": ["d_ff"],
    "G": ["dense_d_ff"],
    "S": ["shared_d_ff"],
    "N": ["num_heads"],
    "K": ["num_kv_heads"],
    "H": ["head_dim"],
    "E": ["num_experts"],
    "Q": ["q_lora_rank"],
    "L": ["kv_lora_rank"],
    "C": ["kv_lora_rank", "qk_rope_head_dim"],
    "U": ["qk_nope_head_dim", "v_head_dim"],
    "W": ["v_head_dim"],
    "M": ["linear_key_heads"],
    "J": ["linear_group"],
    "P": ["linear_key_dim"],
    "X": ["linear_value_dim"],
    "T": ["linear_conv"],
}
SUM = re.compile(r"\(([^()]*\+[^()]*)\)")  # the axes of a tensor's sections


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: its name, its axes, and the axes of jaxtrain's array.

    Axes in brackets are one merged axis. torch stores a linear layer as (out, in), so most arrays are transposed.
    A merged axis of heads is (heads, head_dim), in that order. Here, and in most checkpoints, queries and keys are
    in rotate-half order: the first half of the rotated dimensions is paired with the second. `interleaved` marks the exception.

    A tensor may hold several of jaxtrain's arrays, its sections, one after the other along an axis: "(N H + K H + K H) D" are
    queries, keys and values. In "(N (H + H)) D" each head has both sections. An axis 1 is none of jaxtrain's: columns of two
    sections alternate in "(F (1 + 1))".

    Attributes:
        name: with {i} for the layer, and {e} for the expert if each expert has its own tensor. jaxtrain's array holds all
            experts along its first axis, E.
        jax_axes: axes of jaxtrain's array.
        hf_axes: axes of the checkpoint's tensor.
        section: the index of jaxtrain's array among the tensor's sections.
        interleaved: the axis of `jax_axes` whose rotated dimensions are interleaved pairs in the checkpoint: the last
            dimensions of latent attention's axes, and the first ones of others.
        exact: the tensor is imported and exported in float32, for any dtype of the other tensors.
        parameter: the name in transformers 5's model and in what it saves with save_original_format=False, if it is another.
        copy: the name of the tensor's copy in each module of multi-token prediction, with {i} for the module's layer.
    """

    name: str
    jax_axes: str
    hf_axes: str
    section: int = 0
    interleaved: str = ""
    exact: bool = False
    parameter: str = ""
    copy: str = ""

    @property
    def each_expert(self) -> bool:
        """Return whether each expert has its own tensor in the checkpoint."""
        return "{e}" in self.name

    @property
    def per_tensor(self) -> str:
        """Return the axes of one checkpoint tensor in jaxtrain's order: without E if each expert has its own tensor."""
        return self.jax_axes.removeprefix("E ") if self.each_expert else self.jax_axes

    @property
    def sections(self) -> list[str]:
        """Return the axes of each section, such as N H; [] if the tensor holds one array."""
        match = SUM.search(self.hf_axes)
        return [axes.strip() for axes in match[1].split("+")] if match else []

    @property
    def unmerged(self) -> str:
        """Return the axes of a tensor that would hold jaxtrain's array alone."""
        return SUM.sub(lambda _: f"({self.sections[self.section]})", self.hf_axes)

    @property
    def axes(self) -> list[str]:
        """Return each axis of the checkpoint's tensor, as in `hf_axes`."""
        return re.findall(r"\((?:[^()]|\([^()]*\))*\)|\S+", self.hf_axes)


# Tensors of all families. A model with model.tied_head has no head.
COMMON = {
    "embed.embedding": HfTensor("model.embed_tokens.weight", "V D", "V D"),
    "layers.{i}.attention_norm.scale": HfTensor("model.layers.{i}.input_layernorm.weight", "D", "D"),
    "layers.{i}.attention.wq": HfTensor("model.layers.{i}.self_attn.q_proj.weight", "D N H", "(N H) D"),
    "layers.{i}.attention.wk": HfTensor("model.layers.{i}.self_attn.k_proj.weight", "D K H", "(K H) D"),
    "layers.{i}.attention.wv": HfTensor("model.layers.{i}.self_attn.v_proj.weight", "D K H", "(K H) D"),
    "layers.{i}.attention.wo": HfTensor("model.layers.{i}.self_attn.o_proj.weight", "D N H", "D (N H)"),
    "layers.{i}.mlp_norm.scale": HfTensor("model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.gate_proj.weight", "D F", "F D"),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.up_proj.weight", "D F", "F D"),
    "layers.{i}.mlp.down": HfTensor("model.layers.{i}.mlp.down_proj.weight", "D F", "D F"),
    "final_norm.scale": HfTensor("model.norm.weight", "D", "D"),
    "head": HfTensor("lm_head.weight", "V D", "V D"),
}
# Tensors of models with model.qkv_bias, that and model.attention_out_bias, model.mlp_bias, model.qk_norm (of each head, or
# joint), and with a model.norm_placement of sandwich or post.
QKV_BIAS = {
    "layers.{i}.attention.bq": HfTensor("model.layers.{i}.self_attn.q_proj.bias", "N H", "(N H)"),
    "layers.{i}.attention.bk": HfTensor("model.layers.{i}.self_attn.k_proj.bias", "K H", "(K H)"),
    "layers.{i}.attention.bv": HfTensor("model.layers.{i}.self_attn.v_proj.bias", "K H", "(K H)"),
}
ATTENTION_BIAS = QKV_BIAS | {"layers.{i}.attention.bo": HfTensor("model.layers.{i}.self_attn.o_proj.bias", "D", "D")}
MLP_BIAS = {
    "layers.{i}.mlp.gate_bias": HfTensor("model.layers.{i}.mlp.gate_proj.bias", "F", "F"),
    "layers.{i}.mlp.up_bias": HfTensor("model.layers.{i}.mlp.up_proj.bias", "F", "F"),
    "layers.{i}.mlp.down_bias": HfTensor("model.layers.{i}.mlp.down_proj.bias", "D", "D"),
}
QK_NORM = {
    "layers.{i}.attention.q_norm.scale": HfTensor("model.layers.{i}.self_attn.q_norm.weight", "H", "H"),
    "layers.{i}.attention.k_norm.scale": HfTensor("model.layers.{i}.self_attn.k_norm.weight", "H", "H"),
}
JOINT_QK_NORM = {
    "layers.{i}.attention.q_norm.scale": HfTensor("model.layers.{i}.self_attn.q_norm.weight", "N H", "(N H)"),
    "layers.{i}.attention.k_norm.scale": HfTensor("model.layers.{i}.self_attn.k_norm.weight", "K H", "(K H)"),
}
POST_NORMS = {  # replaces the common name of mlp_norm
    "layers.{i}.attention_post_norm.scale": HfTensor("model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_norm.scale": HfTensor("model.layers.{i}.pre_feedforward_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_post_norm.scale": HfTensor("model.layers.{i}.post_feedforward_layernorm.weight", "D", "D"),
}
ONLY_POST_NORMS = {name: tensor for name, tensor in COMMON.items() if "_norm.scale" not in name or "{i}" not in name}
ONLY_POST_NORMS |= {name: tensor for name, tensor in POST_NORMS.items() if "_post_norm" in name}  # in place of COMMON


GATE_UP = {  # replaces the common names of gate and up
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.gate_up_proj.weight", "D F", "(F + F) D", 0),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.gate_up_proj.weight", "D F", "(F + F) D", 1),
}


# All experts of a layer in one tensor, as transformers 5 writes them with save_original_format=False.
EXPERTS_TOGETHER = {
    "layers.{i}.mlp.router": HfTensor("model.layers.{i}.mlp.gate.weight", "D E", "E D"),
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (F + F) D", 0),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (F + F) D", 1),
    "layers.{i}.mlp.down": HfTensor("model.layers.{i}.mlp.experts.down_proj", "E D F", "E D F"),
}


def in_pairs(tensors: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
    """Return the tensors of a family whose queries and keys have interleaved rotary pairs."""
    rotated = tuple(f".attention.{name}" for name in ("wq", "wk", "bq", "bk"))
    return {k: dataclasses.replace(x, interleaved="H") if k.endswith(rotated) else x for k, x in tensors.items()}


def experts(block: str, gate: str, up: str, down: str) -> dict[str, HfTensor]:
    """Return the tensors of a feed-forward block of experts, with separate tensors for each expert.

    Args:
      block: the block's name in the checkpoint.
      gate, up, down: names of the matrices in the checkpoint.
    """
    prefix = f"model.layers.{{i}}.{block}.experts.{{e}}."
    return {
        "layers.{i}.mlp.router": HfTensor(f"model.layers.{{i}}.{block}.gate.weight", "D E", "E D"),
        "layers.{i}.mlp.gate": HfTensor(f"{prefix}{gate}.weight", "E D F", "F D"),
        "layers.{i}.mlp.up": HfTensor(f"{prefix}{up}.weight", "E D F", "F D"),
        "layers.{i}.mlp.down": HfTensor(f"{prefix}{down}.weight", "E D F", "D F"),
    }
