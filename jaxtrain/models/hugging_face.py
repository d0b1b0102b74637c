"""What families say of their Hugging Face checkpoints, and the keys of config.json that most of them share. No jax.

config.json has had two manners. transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 both in `rope_parameters`,
by type of layer where layers differ. Both are read, and what is written holds both. A key that is not there is never taken to
be what transformers would make of it, where that would change the numbers and go unnoticed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import windows
from jaxtrain.config import Model

SLIDING, FULL = "sliding_attention", "full_attention"
# Keys that say nothing of what the weights compute: of training, of generation, of transformers itself.
NO_MATTER = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings"),
        *("pretraining_tp", "attention_dropout", "id2label", "label2id", "problem_type", "return_dict", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "cache_implementation", "unsloth_fixed"),
        *("unsloth_version", "transformers.js_config"),
        *("_attn_implementation", "_attn_implementation_autoset", "_sliding_window_pattern", "hidden_dropout", "auto_map"),
        *("output_router_logits", "router_aux_loss_coef"),
    )
)
_NO_DEFAULT: Any = object()


class HuggingFaceError(ValueError):
    """A Hugging Face folder that is not understood, or a model that their formats cannot hold. Names the key or tensor."""


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor's name in a Hugging Face checkpoint, and how its array becomes ours.

    `ours` and `theirs` are the axes of the two arrays; axes in brackets are one merged axis there. torch stores a linear
    layer as (out, in), so most differ by a transpose. Head axes split off as (heads, head_dim), in that order.
    Hugging Face keeps queries and keys in rotate-half order (first half of the head dimension paired with the second), which
    is ours too: nothing is permuted.

    A name with {e}, the expert, is of many tensors, one an expert. Ours is all of them, along its first axis, E. An axis 2 of
    theirs holds two of ours, of which this is `half`.
    """

    name: str
    ours: str
    theirs: str
    half: int = 0

    @property
    def each_expert(self) -> bool:
        """Whether each expert has a tensor of its own there."""
        return "{e}" in self.name

    @property
    def each(self) -> str:
        """The axes of what one tensor there holds, in our order."""
        return self.ours.removeprefix("E ") if self.each_expert else self.ours


# What all families have. {i} is the layer. A model whose head is tied has no head.
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
# Where a family has them: model.qkv_bias, model.qk_norm, model.sandwich_norm.
QKV_BIAS = {
    "layers.{i}.attention.bq": HfTensor("model.layers.{i}.self_attn.q_proj.bias", "N H", "(N H)"),
    "layers.{i}.attention.bk": HfTensor("model.layers.{i}.self_attn.k_proj.bias", "K H", "(K H)"),
    "layers.{i}.attention.bv": HfTensor("model.layers.{i}.self_attn.v_proj.bias", "K H", "(K H)"),
}
QK_NORM = {
    "layers.{i}.attention.q_norm.scale": HfTensor("model.layers.{i}.self_attn.q_norm.weight", "H", "H"),
    "layers.{i}.attention.k_norm.scale": HfTensor("model.layers.{i}.self_attn.k_norm.weight", "H", "H"),
}
POST_NORMS = {  # in place of the common name of mlp_norm
    "layers.{i}.attention_post_norm.scale": HfTensor("model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_norm.scale": HfTensor("model.layers.{i}.pre_feedforward_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_post_norm.scale": HfTensor("model.layers.{i}.post_feedforward_layernorm.weight", "D", "D"),
}


# In place of a tensor an expert: what transformers 5 writes with save_original_format=False, as it has them in memory.
EXPERTS_TOGETHER = {
    "layers.{i}.mlp.router": HfTensor("model.layers.{i}.mlp.gate.weight", "D E", "E D"),
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (2 F) D", 0),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (2 F) D", 1),
    "layers.{i}.mlp.down": HfTensor("model.layers.{i}.mlp.experts.down_proj", "E D F", "E D F"),
}


class Settings:
    """A config.json being read: what was taken of it, and what is left."""

    def __init__(self, values: Mapping[str, Any], path: str = "config.json"):
        self.path = path
        self._left = dict(values)

    def take(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        """The value of a key, which counts as read from now on. Without a default, it has to be there."""
        if key in self._left:
            value = self._left.pop(key)
            if value is not None or default is None:
                return value
        if default is _NO_DEFAULT:
            raise HuggingFaceError(f"{self.path}: no key {key!r}. Add it, with what the model was trained with.")
        return default

    def whole(self, key: str, default: Any = _NO_DEFAULT) -> int:
        """A number of layers, heads or the like. Raises HuggingFaceError where it is none."""
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise HuggingFaceError(f"{self.path}: {key} = {value!r}: must be a whole number above 0.")
        return value

    def number(self, key: str, default: Any = _NO_DEFAULT) -> float:
        """Raises HuggingFaceError where the value is no number."""
        value = self.take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise HuggingFaceError(f"{self.path}: {key} = {value!r}: must be a number.")
        return float(value)

    def said(self, key: str) -> Any:
        """The value of a key that has to be there, and may be null: where it is not, transformers has a number of its own."""
        if key not in self._left:
            raise HuggingFaceError(f"{self.path}: no key {key!r}. Add it, null where the model was trained without.")
        return self._left.pop(key)

    def only(self, key: str, value: Any, why: str) -> None:
        """Refuse any value but one (or its absence)."""
        given = self.take(key, value)
        if given != value:
            raise HuggingFaceError(f"{self.path}: {key} = {given!r}: {why}.")

    def finish(self) -> None:
        """Raises HuggingFaceError where a key is left that nothing is known of: it may change what the weights compute."""
        self.only("attention_dropout", 0.0, "jaxtrain has no dropout; set it to 0.0 to go on without")
        left = sorted(key for key in self._left.keys() - NO_MATTER if self._left[key] is not None)
        if left:
            shown = ", ".join(f"{key} = {self._left[key]!r}" for key in left)
            raise HuggingFaceError(
                f"{self.path}: unknown {'key' if len(left) == 1 else 'keys'} {shown}. It may change what the model computes. "
                "Remove it from config.json if you know that it does not."
            )


def read_common(s: Settings, activation: str, tied: bool | None = None, free_heads: bool = False) -> dict[str, Any]:
    """The keys of config.Model that all families read alike.

    activation: what the gate must be. tied: what the head is where config.json does not say: transformers 4 leaves that key out
    where it is True for all models of a class. free_heads: the width of a head must be said.
    """
    for name in ("hidden_act", "hidden_activation"):
        if (given := s.take(name, None)) not in (None, activation):
            raise HuggingFaceError(f"{s.path}: {name} = {given!r}: models of this family are built with {activation!r} only.")
    s.only("attention_bias", False, "biases on attention's projections are built for Qwen2 alone, and there without this key")
    s.only("mlp_bias", False, "the feed-forward block is built without biases")
    width, heads = s.whole("hidden_size"), s.whole("num_attention_heads")
    return {
        "num_layers": s.whole("num_hidden_layers"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": s.whole("num_key_value_heads", heads),
        "head_dim": s.whole("head_dim") if free_heads else s.whole("head_dim", width // heads),
        "d_ff": s.whole("intermediate_size"),
        "vocab_size": s.whole("vocab_size"),
        "norm_eps": s.number("rms_norm_eps"),
        "tied_head": s.take("tie_word_embeddings", _NO_DEFAULT if tied is None else tied),
    }


def read_experts(s: Settings, experts: int) -> dict[str, Any]:
    """Of config.Model what all families with experts read alike. experts: how many, which families call differently."""
    chosen = s.whole("num_experts_per_tok")
    if chosen > experts:
        raise HuggingFaceError(f"{s.path}: num_experts_per_tok = {chosen}: there are only {experts} experts.")
    return {"num_experts": experts, "experts_per_token": chosen}


def read_rope(s: Settings, known: Sequence[str] = ("default", "llama3", "linear")) -> dict[str, Any]:
    """`rope_*` of config.Model from either manner of config.json, for models whose layers all turn alike."""
    old = {"rope_theta": s.take("rope_theta", None), **(s.take("rope_scaling", None) or {})}
    new = s.take("rope_parameters", None) or {}
    if FULL in new or SLIDING in new:
        given = {key: value for key, value in new.items() if value is not None}
        if any(value != next(iter(given.values())) for value in given.values()):
            raise HuggingFaceError(f"{s.path}: rope_parameters = {new!r}: layers of this family all turn alike.")
        new = next(iter(given.values()))
    return _rope(_agreed(s, old, new), s.path, known)


def _agreed(s: Settings, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """One set of rotary settings of the two places where they may stand."""
    old, new = ({_RENAMED.get(k, k): v for k, v in x.items() if v is not None} for x in (old, new))
    both = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    if both:
        raise HuggingFaceError(
            f"{s.path}: {both[0]} is {old[both[0]]!r} in the manner of transformers 4 and {new[both[0]]!r} in rope_parameters. "
            "Remove the wrong one."
        )
    return old | new


_RENAMED = {"type": "rope_type"}


def _rope(given: Mapping[str, Any], path: str, known: Sequence[str]) -> dict[str, Any]:
    s = Settings(given, f"{path}, rotary settings")
    kind = s.take("rope_type", "default")
    if kind not in known:
        raise HuggingFaceError(f"{path}: rope_type = {kind!r}: is not supported. Known: {', '.join(known)}.")
    if given.get("rope_theta") is None:
        raise HuggingFaceError(
            f"{path}: no rope_theta, neither by itself nor in rope_parameters. Add the base that the model was trained with; "
            "transformers would take its default without a word. Llama 2 was trained with 10000.0: --set rope_theta=10000.0"
        )
    s.only("partial_rotary_factor", 1.0, "only whole heads are rotated")
    out: dict[str, Any] = {"rope_base": s.number("rope_theta"), "rope_scaling": "none" if kind == "default" else kind}
    if kind in ("llama3", "linear"):
        out["rope_factor"] = s.number("factor")
    if kind == "llama3":
        out["rope_low_freq"] = s.number("low_freq_factor")
        out["rope_high_freq"] = s.number("high_freq_factor")
        out["rope_original_len"] = s.whole("original_max_position_embeddings")
    s.finish()
    return out


def read_rope_by_kind(s: Settings) -> dict[str, Any]:
    """The same, where layers that see a sliding window turn at a base of their own, which is never scaled (Gemma 3)."""
    old = {"rope_theta": s.take("rope_theta", None), **(s.take("rope_scaling", None) or {})}
    new = s.take("rope_parameters", None) or {}
    unknown = sorted(new.keys() - {FULL, SLIDING})
    if unknown:
        raise HuggingFaceError(f"{s.path}: rope_parameters has {unknown[0]!r}; it must have {FULL!r} and {SLIDING!r} alone.")
    local = _agreed(s, {"rope_theta": s.take("rope_local_base_freq", None)}, new.get(SLIDING) or {})
    out = _rope(_agreed(s, old, new.get(FULL) or {}), s.path, ("default", "linear"))
    return out | {"local_rope_base": _rope(local, f"{s.path}, {SLIDING}", ("default",))["rope_base"]}


def read_layer_types(s: Settings, layers: int) -> str | None:
    """A letter for each layer (`windows.LOCAL`, `windows.GLOBAL`) by `layer_types`; None where there is no such key."""
    types = s.take("layer_types", None)
    if types is None:
        return None
    letters = {SLIDING: windows.LOCAL, FULL: windows.GLOBAL}
    unknown = [t for t in types if t not in letters]
    if unknown or len(types) != layers:
        what = f"{unknown[0]!r} is not supported" if unknown else f"has {len(types)} items for {layers} layers"
        raise HuggingFaceError(f"{s.path}: layer_types: {what}. Known: {', '.join(letters)}.")
    return "".join(letters[t] for t in types)


def windows_of(letters: str, window: int | None, path: str) -> dict[str, Any]:
    """`sliding_window` and `attention_pattern` of config.Model, of a letter for each layer."""
    if windows.LOCAL not in letters:
        return {"sliding_window": 0, "attention_pattern": ""}
    if not window:
        raise HuggingFaceError(f"{path}: sliding_window = {window!r}, but some layers see a sliding window.")
    pattern = windows.pattern_of(letters)
    return {"sliding_window": window, "attention_pattern": "" if pattern == windows.LOCAL else pattern}


def write_common(model: Model, activation: str, key: str = "hidden_act") -> dict[str, Any]:
    """The inverse of `read_common`."""
    return {
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        key: activation,
    }


def rope_settings(model: Model) -> dict[str, Any]:
    """rope_parameters of transformers 5."""
    out: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    if model.rope_scaling != "none":
        out |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        out |= {
            "low_freq_factor": model.rope_low_freq,
            "high_freq_factor": model.rope_high_freq,
            "original_max_position_embeddings": model.rope_original_len,
        }
    return out


def write_rope(model: Model) -> dict[str, Any]:
    """The inverse of `read_rope`, in both manners."""
    new = rope_settings(model)
    scaling = {k: v for k, v in new.items() if k != "rope_theta"} if model.rope_scaling != "none" else None
    return {"rope_theta": model.rope_base, "rope_scaling": scaling, "rope_parameters": new}


def write_layer_types(model: Model) -> list[str]:
    """The inverse of `read_layer_types`."""
    return [SLIDING if kind == windows.LOCAL else FULL for kind in windows.kinds(model)]


def must_have(model: Model, family: str, **wanted: Any) -> None:
    """Raises HuggingFaceError where a model has what its family's format cannot say."""
    for key, value in wanted.items():
        given = getattr(model, key)
        if given != value:
            raise HuggingFaceError(
                f"model.{key} = {given!r}: transformers' {family} has {value!r} only, so no checkpoint of that family can hold "
                "this model. Set model.family to one that has it, if there is one."
            )


def must_have_experts(model: Model, family: str) -> None:
    """Raises HuggingFaceError for a model without experts, or with more to them than a softmax that chooses some of them."""
    if not model.num_experts:
        raise HuggingFaceError(
            f"model.num_experts = 0: transformers' {family} has experts in every layer. Set model.family to another."
        )
    must_have(model, family, router="softmax", router_bias=False, shared_d_ff=0)
