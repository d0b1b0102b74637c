"""The format of a family's Hugging Face checkpoints: their tensors and config.json keys, and jaxtrain's names. Imports no jax.

config.json has two forms. transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes both in
`rope_parameters`, by type of layer if layers differ. Both forms are read, and an export contains both. A missing key is an
error if transformers' default for that key would silently change the logits.
"""

import dataclasses
import json
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config.commands import spelled
from jaxtrain.config.schema import GLOBAL, LOCAL, Model
from jaxtrain.models import FAMILIES, family, windows

RAW = "jaxtrain"  # model_type of a folder with jaxtrain's own names and settings
OWN = "jaxtrain_own"  # key of config.json with the section `own` of a config
FAMILY = "jaxtrain_family"  # key of config.json with a family from outside the package, package.module:name
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys without effect on the logits: keys for training, for transformers itself, and of tools.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings"),
        *("pretraining_tp", "id2label", "label2id", "problem_type", "return_dict", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "cache_implementation"),
        *("transformers.js_config", "hidden_dropout", "auto_map", "_sliding_window_pattern"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_experts_implementation"),
        *("experts_implementation", "_flash_attn_2_enabled", "use_flash_attention", "use_flash_attn"),
        *("output_router_logits", "router_aux_loss_coef", "num_mtp_layers", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("is_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "finetuning_task", "num_labels"),
        *("task_specific_params", "tokenizer_class", "processor_class", "prefix", "sep_token_id", "decoder_start_token_id"),
        *("gradient_checkpointing", "loss_type", "_commit_hash", "max_sequence_length", "model_max_length"),
        *("tie_last_hidden_states", "is_llama_config", FAMILY, OWN),
    )
)
PREFIXES = ("unsloth_",)  # of further keys without effect
# fmt: off
# Keys for generation that transformers 4 wrote into config.json, and their defaults. transformers 5 ignores them there, and the
# logits do not depend on them.
GENERATION = {
    "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
    "num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False, "exponential_decay_length_penalty": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "max_new_tokens": None, "min_new_tokens": None,
    "min_p": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": None, "renormalize_logits": False,
    "output_logits": None, "guidance_scale": None, "max_time": None, "stop_strings": None,
}
# Keys that are read only with the value that leaves the model as it is. The class of every family reads some of them, and code
# that comes with a model may read the others.
NEUTRAL = {
    "rope_interleaved": False, "use_sliding_window": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "pruned_heads": {}, "per_layer_config": {}, "quantization_config": {}, "layer_types": "full_attention",
    "use_qk_norm": False, "qk_norm": False, "qk_layernorm": False, "use_parallel_residual": False, "parallel_attn": False,
    "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "rope_ratio": 1.0, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "logit_scale": 1.0, "qkv_bias": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "use_mrope": False, "num_local_experts": 0,
    "use_cache_quantization": False, "use_cache_kernel": False, "use_bidirectional_attention": False, "bias": False,
}
# fmt: on
_NO_DEFAULT: Any = object()


class HuggingFaceError(ValueError):
    """An unsupported Hugging Face folder, or a model without a Hugging Face format. The message names the key or tensor."""


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: its name, its axes, and the axes of jaxtrain's array.

    Axes in brackets in `theirs` are one merged axis. torch stores a linear layer as (out, in), so most arrays are transposed.
    A merged axis of heads is (heads, head_dim), in that order. Here, and in most checkpoints, queries and keys are
    in rotate-half order: the first half of the rotated dimensions is paired with the second. `interleaved` marks the exception.

    Attributes:
        name: with {i} for the layer, and {e} for the expert if each expert has its own tensor. jaxtrain's array holds all
            experts along its first axis, E.
        ours: axes of jaxtrain's array.
        theirs: axes of the checkpoint's tensor. An axis named 2 has size 2: the tensor holds two of jaxtrain's arrays.
        half: the index of jaxtrain's array along the axis named 2.
        interleaved: the axis of `ours` whose rotated dimensions (hf/names.py) are interleaved pairs in the checkpoint.
        exact: the tensor is imported and exported in float32, for any dtype of the other tensors.
        copy: the name of the tensor's copy in each module of multi-token prediction, with {i} for the module's layer.
    """

    name: str
    ours: str
    theirs: str
    half: int = 0
    interleaved: str = ""
    exact: bool = False
    copy: str = ""

    @property
    def each_expert(self) -> bool:
        """Return whether each expert has its own tensor in the checkpoint."""
        return "{e}" in self.name

    @property
    def each(self) -> str:
        """Return the axes of one checkpoint tensor in jaxtrain's order: without E if each expert has its own tensor."""
        return self.ours.removeprefix("E ") if self.each_expert else self.ours


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
# Tensors of models with model.qkv_bias, model.qk_norm, model.sandwich_norm.
QKV_BIAS = {
    "layers.{i}.attention.bq": HfTensor("model.layers.{i}.self_attn.q_proj.bias", "N H", "(N H)"),
    "layers.{i}.attention.bk": HfTensor("model.layers.{i}.self_attn.k_proj.bias", "K H", "(K H)"),
    "layers.{i}.attention.bv": HfTensor("model.layers.{i}.self_attn.v_proj.bias", "K H", "(K H)"),
}
QK_NORM = {
    "layers.{i}.attention.q_norm.scale": HfTensor("model.layers.{i}.self_attn.q_norm.weight", "H", "H"),
    "layers.{i}.attention.k_norm.scale": HfTensor("model.layers.{i}.self_attn.k_norm.weight", "H", "H"),
}
POST_NORMS = {  # replaces the common name of mlp_norm
    "layers.{i}.attention_post_norm.scale": HfTensor("model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_norm.scale": HfTensor("model.layers.{i}.pre_feedforward_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_post_norm.scale": HfTensor("model.layers.{i}.post_feedforward_layernorm.weight", "D", "D"),
}


# All experts of a layer in one tensor, as transformers 5 writes them with save_original_format=False.
EXPERTS_TOGETHER = {
    "layers.{i}.mlp.router": HfTensor("model.layers.{i}.mlp.gate.weight", "D E", "E D"),
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (2 F) D", 0),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.experts.gate_up_proj", "E D F", "E (2 F) D", 1),
    "layers.{i}.mlp.down": HfTensor("model.layers.{i}.mlp.experts.down_proj", "E D F", "E D F"),
}


def experts(block: str, gate: str, up: str, down: str) -> dict[str, HfTensor]:
    """Return the tensors of a feed-forward block of experts, with separate tensors for each expert.

    Args:
      block: the block's name in the checkpoint.
      gate, up, down: names of the matrices in the checkpoint.
    """
    one = f"model.layers.{{i}}.{block}.experts.{{e}}."
    return {
        "layers.{i}.mlp.router": HfTensor(f"model.layers.{{i}}.{block}.gate.weight", "D E", "E D"),
        "layers.{i}.mlp.gate": HfTensor(f"{one}{gate}.weight", "E D F", "F D"),
        "layers.{i}.mlp.up": HfTensor(f"{one}{up}.weight", "E D F", "F D"),
        "layers.{i}.mlp.down": HfTensor(f"{one}{down}.weight", "E D F", "D F"),
    }


class Settings:
    """A config.json during reading: every key that is read is removed, so that unknown keys remain."""

    def __init__(self, values: Mapping[str, Any], path: str = "config.json"):
        self.path = path
        self.given = types.MappingProxyType(dict(values))
        self._left = dict(values)

    def take(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        """Return the value of a key, or the default if the key is missing or null.

        Raises:
            HuggingFaceError: the key is missing or null, and there is no default.
        """
        if key in self._left:
            value = self._left.pop(key)
            if value is not None or default is None:
                return value
        if default is _NO_DEFAULT:
            raise HuggingFaceError(f"{self.path}: no key {key!r}.{self._added(key)}")
        return default

    def _added(self, key: str, more: str = "") -> str:
        if not self.path.endswith("config.json"):
            return " Add it, with what the model was trained with."
        return f" Fix, with what the model was trained with{more}: {import_with(self.path, f'{key}=VALUE')}."

    def whole(self, key: str, default: Any = _NO_DEFAULT) -> int:
        """Return the value of a key, as `take` does; it must be a whole number above 0."""
        return self._checked(key, default, int, "a whole number above 0")

    def number(self, key: str, default: Any = _NO_DEFAULT) -> float:
        """Return the value of a key, as `take` does; it must be a number."""
        value = self._checked(key, default, (int, float), "a number")
        if not abs(value) <= sys.float_info.max:
            raise HuggingFaceError(f"{self.path}: {key} = {value!r:.40}: must be a finite number.")
        return float(value)

    def flag(self, key: str, default: Any = _NO_DEFAULT) -> bool:
        """Return the value of a key, as `take` does; it must be true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise HuggingFaceError(f"{self.path}: {key} = {value!r}: must be true or false.")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the value of a key, a JSON object; {} if the key is missing or null."""
        return self._checked(key, {}, dict, "an object of JSON, or null")

    def _checked(self, key: str, default: Any, kind: Any, rule: str) -> Any:
        value = self.take(key, default)
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 1):
            raise HuggingFaceError(f"{self.path}: {key} = {value!r}: must be {rule}.")
        return value

    def nullable(self, key: str) -> Any:
        """Return the value of a key that must be present and may be null, because transformers' default for it is not null."""
        if key not in self._left:
            raise HuggingFaceError(f"{self.path}: no key {key!r}.{self._added(key, ' (null: without)')}")
        return self._left.pop(key)

    def only(self, key: str, value: Any, why: str) -> None:
        """Raise HuggingFaceError if the key is present with another value than `value`. why: the error's reason."""
        given = self.take(key, value)
        if given != value:
            raise HuggingFaceError(f"{self.path}: {key} = {given!r}: {why}.")

    def unread(self) -> list[str]:
        """Return the keys that were not read and may change the logits."""
        without_windows = ("sliding_window", "max_window_layers") if self._left.get("use_sliding_window") is False else ()
        left = self._left.keys() - WITHOUT_EFFECT - GENERATION.keys() - set(without_windows)
        return sorted(key for key in left if not key.startswith(PREFIXES) and not _neutral(key, self._left[key]))

    def refuse_unknown(self) -> None:
        """Raise HuggingFaceError if attention_dropout is not 0, or if unread keys remain that may change the logits."""
        rule = f"jaxtrain has no dropout. Fix, to train without: {import_with(self.path, 'attention_dropout=0.0')}"
        self.only("attention_dropout", 0.0, rule)
        if left := self.unread():
            shown = ", ".join(f"{key} = {self._left[key]!r}" for key in left)
            one = len(left) == 1
            raise HuggingFaceError(
                f"{self.path}: unknown {'key' if one else 'keys'} {shown}. {'It' if one else 'They'} may change what the model "
                f"computes. Fix, if you know that {'it does' if one else 'they do'} not: "
                f"{import_with(self.path, *(f'{key}=null' for key in left))}"
            )


def _neutral(key: str, value: Any) -> bool:
    """Return whether a key of config.json leaves the model as it is with this value."""
    if value is None:
        return True
    if isinstance(value, list):  # a value for each layer
        return key in NEUTRAL and all(each == NEUTRAL[key] for each in value)
    return key in NEUTRAL and value == NEUTRAL[key] and isinstance(value, bool) == isinstance(NEUTRAL[key], bool)


def import_with(path: str, *changes: str) -> str:
    """Return the command that imports a folder with other keys of config.json, whose result every command takes.

    path: of the config.json.
    """
    folder = shlex.quote(path.partition("config.json")[0].rstrip("/") or "DIR")
    given = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    return spelled(f"python -m jaxtrain hf import {folder} --out=RUN {given}; then use RUN")


@dataclasses.dataclass(frozen=True)
class Part:
    """Some keys of config.json, and the keys of config.Model that they set.

    Attributes:
        read: returns keys of config.Model, from config.json and the number of layers.
        write: returns keys of config.json; the inverse of `read`.
    """

    read: Callable[[Settings, int], dict[str, Any]]
    write: Callable[[Model], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Format:
    """The Hugging Face checkpoints of a family.

    Attributes:
        model_type: the value of model_type in config.json.
        architecture: the class name in transformers, in config.json.
        tensors: the checkpoint's tensors, by jaxtrain's names.
        parts: keys of config.json in addition to the sizes that all families have.
        model: keys of config.Model with one value in all models of the family.
        fixed: keys of config.json that must have one value, and the reason for each.
        written: further keys of config.json in an export, and their values.
        activation: the activation's name in config.json.
        activation_key: the activation's key in an export.
        head_dim: whether config.json has the key head_dim: optional | required | absent (always hidden_size /
            num_attention_heads).
        attention_bias: the value of attention_bias in config.json.
        beyond: why tensors of layers after the last layer are not used; "": such tensors are an error.
        tied: model.tied_head if config.json has no tie_word_embeddings, a key that transformers 4 omits for the default of the
            class. None: the key is required.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, HfTensor]
    parts: tuple[Part, ...]
    model: Mapping[str, Any] = types.MappingProxyType({})
    fixed: Mapping[str, tuple[Any, str]] = types.MappingProxyType({})
    written: Mapping[str, Any] = types.MappingProxyType({})
    activation: str = "silu"
    activation_key: str = "hidden_act"
    head_dim: str = "optional"
    tied: bool | None = None
    attention_bias: bool = False
    beyond: str = ""

    def read(self, s: Settings) -> dict[str, Any]:
        """Return keys of config.Model, from config.json. Raises HuggingFaceError for a value that jaxtrain does not support."""
        for name in ("hidden_act", "hidden_activation"):
            if (given := s.take(name, None)) not in (None, self.activation):
                rule = f"models of this family are built with {self.activation!r} only"
                raise HuggingFaceError(f"{s.path}: {name} = {given!r}: {rule}.")
        rule = "Qwen2 and GPT-OSS have biases on attention's projections, other families have none"
        s.only("attention_bias", self.attention_bias, rule)
        s.only("mlp_bias", False, "the feed-forward block is built without biases")
        for key, (value, why) in self.fixed.items():
            s.only(key, value, why)
        width, heads = s.whole("hidden_size"), s.whole("num_attention_heads")
        out = {
            "num_layers": s.whole("num_hidden_layers"),
            "d_model": width,
            "num_heads": heads,
            "num_kv_heads": s.whole("num_key_value_heads", heads),
            "head_dim": s.whole("head_dim") if self.head_dim == "required" else s.whole("head_dim", width // heads),
            "d_ff": s.whole("intermediate_size"),
            "vocab_size": s.whole("vocab_size"),
            "norm_eps": s.number("rms_norm_eps"),
            "tied_head": s.flag("tie_word_embeddings", _NO_DEFAULT if self.tied is None else self.tied),
            **self.model,
        }
        for part in self.parts:
            out |= part.read(s, out["num_layers"])
        s.only("quantization_config", {}, "weights in this form are not read. Fix: name the model that was quantized")
        s.refuse_unknown()
        return out

    def write(self, model: Model) -> dict[str, Any]:
        """Return keys of config.json. Settings of the model without a key in the format are lost.

        To find lost settings, compare `read` of the result with the model.
        """
        out = {
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
            self.activation_key: self.activation,
            **{key: value for key, (value, _) in self.fixed.items()},
            **self.written,
        }
        if self.head_dim == "absent":
            del out["head_dim"]
        for part in self.parts:
            out |= part.write(model)
        return out


def format_of(name: str) -> Format:
    """Return the `FORMAT` of a family, by its name in FAMILIES or as `package.module:name`.

    Raises:
        HuggingFaceError: the family has no FORMAT.
        ConfigError: the family cannot be imported.
    """
    found = getattr(family(name), "FORMAT", None)
    if isinstance(found, Format):
        return found
    rule = "has no FORMAT, the table of its names in Hugging Face's checkpoints"
    rule = rule if found is None else f"its FORMAT is {type(found).__name__}, and no jaxtrain.models.hugging_face.Format"
    fix = spelled("python -m jaxtrain hf export RUN --out=DIR --raw")
    raise HuggingFaceError(f"model.family = {name!r}: {rule}. Fix, for jaxtrain's names: {fix}.")


def family_of(settings: Mapping[str, Any], path: str) -> str:
    """Return the family of a config.json: the one in FAMILIES with its model_type, or the one that its key FAMILY names.

    path: of the config.json, for errors. Raises HuggingFaceError if there is none.
    """
    kind, own = settings.get("model_type"), settings.get(FAMILY)
    if own is not None:
        if not isinstance(own, str) or not all(own.partition(":")):
            raise HuggingFaceError(f"{path}: {FAMILY} = {own!r}: must be package.module:name.")
        if (wanted := format_of(own).model_type) != kind:
            raise HuggingFaceError(f"{path}: model_type = {kind!r}: the FORMAT of {FAMILY} = {own!r} is for {wanted!r}.")
        return own
    known = {format_of(name).model_type: name for name in FAMILIES}
    if isinstance(kind, str) and kind in known:
        return known[kind]
    if kind is None and isinstance(settings.get("model"), dict):
        raise HuggingFaceError(f"{path}: belongs to a run of jaxtrain. Use the run itself, or hf export it first.")
    if "text_config" in settings:
        rule = "models that see or hear are not supported, nor their text part alone"
    else:
        own_fix = import_with(path, f"{FAMILY}=package.module:name")
        rule = f"no such architecture in jaxtrain. Known: {', '.join(known)}. Fix, for a family of your own: {own_fix}"
    raise HuggingFaceError(f"{path}: model_type = {kind!r}: {rule}.")


# ---- Rotary embeddings


def _agreed(s: Settings, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of config.json, merged from both of its forms. Settings in both forms must be equal."""
    old, new = ({{"type": "rope_type"}.get(k, k): v for k, v in x.items() if v is not None} for x in (old, new))
    both = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    if both:
        raise HuggingFaceError(
            f"{s.path}: {both[0]} is {old[both[0]]!r} in the form of transformers 4 and {new[both[0]]!r} in rope_parameters. "
            "Remove the wrong one."
        )
    return {**old, **new}


def _old_rope(s: Settings) -> dict[str, Any]:
    return {"rope_theta": s.take("rope_theta", None), **s.mapping("rope_scaling")}


def _not_built(kind: Any) -> str:
    """Return why a rope_type is an error.

    Frequencies that depend on the sequence length do not fit jaxtrain. A packed row has documents of several lengths, and a
    cache has keys that were rotated when the sequence was shorter.
    """
    if kind not in ("dynamic", "longrope"):
        return "is not supported"
    rule = "is not supported, because its frequencies follow the length of each sequence"
    return rule if kind == "longrope" else f"{rule}. Up to max_position_embeddings tokens it equals default"


def _rope(
    given: Mapping[str, Any], path: str, known: Sequence[str], whole: Callable[[Any], Any] = lambda own: own
) -> dict[str, Any]:
    """Return keys of config.Model of rotary settings. whole: returns rope_parameters with these settings among those of all
    layers, which remedies name.
    """

    def instead(settings: Mapping[str, Any]) -> str:
        return import_with(path, "rope_scaling=null", f"rope_parameters={json.dumps(whole(settings))}")

    s = Settings(given, f"{path}, rotary settings")
    kind = s.take("rope_type", "default")
    if kind not in known:
        plain = {"rope_type": "default", "rope_theta": given.get("rope_theta")}
        fix = f" Fix: {instead(plain)}." * (kind == "dynamic")
        raise HuggingFaceError(f"{path}: rope_type = {kind!r}: {_not_built(kind)}. Known: {', '.join(known)}.{fix}")
    if given.get("rope_theta") is None:
        raise HuggingFaceError(
            f"{path}: no rope_theta, neither by itself nor in rope_parameters. Add the base that the model was trained with; "
            f"transformers would silently use its default. Fix, for Llama 2: {import_with(path, 'rope_theta=10000.0')}."
        )
    s.only("partial_rotary_factor", 1.0, "only whole heads are rotated")
    out: dict[str, Any] = {"rope_base": s.number("rope_theta"), "rope_scaling": "none" if kind == "default" else kind}
    if kind in ("llama3", "linear", "yarn"):
        out["rope_factor"] = s.number("factor")
    if kind == "llama3":
        out["rope_low_freq"] = s.number("low_freq_factor")
        out["rope_high_freq"] = s.number("high_freq_factor")
    if kind in ("llama3", "yarn"):
        out["rope_original_len"] = s.whole("original_max_position_embeddings")
    if kind == "yarn":
        # transformers also reads 0 as the default.
        out["rope_beta_fast"] = s.number("beta_fast", 0.0) or 32.0
        out["rope_beta_slow"] = s.number("beta_slow", 0.0) or 1.0
        out["rope_truncate"] = s.flag("truncate", True)
        out |= {f"rope_{key}": s.number(key, 0.0) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    if left := s.unread():
        shown = ", ".join(f"{key} = {given[key]!r}" for key in left)
        fix = instead({key: value for key, value in given.items() if key not in left})
        raise HuggingFaceError(f"{s.path}: unknown {shown}. Fix, if it changes nothing: {fix}.")
    return out


def _read_rope(s: Settings, _: int) -> dict[str, Any]:
    old, new = _old_rope(s), s.mapping("rope_parameters")
    if FULL in new or SLIDING in new:
        given = [value for value in new.values() if value is not None]
        if any(value != given[0] for value in given):
            raise HuggingFaceError(f"{s.path}: rope_parameters = {new!r}: all layers of this family have the same.")
        new = given[0]
    return _rope(_agreed(s, old, new), s.path, ("default", "llama3", "linear", "yarn"))


def _new_rope(model: Model) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": model.rope_base, "rope_type": "default"}
    if model.rope_scaling != "none":
        out |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        out |= {"low_freq_factor": model.rope_low_freq, "high_freq_factor": model.rope_high_freq}
    if model.rope_scaling in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = model.rope_original_len
    if model.rope_scaling == "yarn":
        out |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow, "truncate": model.rope_truncate}
        factors = {key: getattr(model, f"rope_{key}") for key in ("attention_factor", "mscale", "mscale_all_dim")}
        out |= {key: value for key, value in factors.items() if value}
    return out


def _write_rope(model: Model) -> dict[str, Any]:
    new = _new_rope(model)
    scaling = {k: v for k, v in new.items() if k != "rope_theta"} if model.rope_scaling != "none" else None
    return {"rope_theta": model.rope_base, "rope_scaling": scaling, "rope_parameters": new}


def _read_rope_by_kind(s: Settings, _: int) -> dict[str, Any]:
    old, by_kind = _old_rope(s), s.mapping("rope_parameters")
    new = Settings(by_kind, f"{s.path}: rope_parameters")
    unknown = sorted(by_kind.keys() - {FULL, SLIDING})
    if unknown:
        raise HuggingFaceError(f"{s.path}: rope_parameters has {unknown[0]!r}; it must have {FULL!r} and {SLIDING!r} alone.")
    local = _agreed(s, {"rope_theta": s.take("rope_local_base_freq", None)}, new.mapping(SLIDING))
    full = _agreed(s, old, new.mapping(FULL))
    out = _rope(full, s.path, ("default", "linear"), lambda own: {FULL: own, SLIDING: local})
    of_local = _rope(local, f"{s.path}, {SLIDING}", ("default",), lambda own: {FULL: full, SLIDING: own})
    return out | {"local_rope_base": of_local["rope_base"]}


def _write_rope_by_kind(model: Model) -> dict[str, Any]:
    local = model.local_rope_base or model.rope_base
    new = {FULL: _new_rope(model), SLIDING: {"rope_theta": local, "rope_type": "default"}}
    return _write_rope(model) | {"rope_local_base_freq": local, "rope_parameters": new}


ROPE = Part(_read_rope, _write_rope)
# Layers with a sliding window have their own rotary base, and no rotary scaling.
ROPE_BY_KIND = Part(_read_rope_by_kind, _write_rope_by_kind)


# ---- Sliding windows


def _layer_types(s: Settings, layers: int) -> str | None:
    """Return a letter for each layer (`LOCAL`, `GLOBAL`) from `layer_types`; None without that key."""
    kinds = s.take("layer_types", None)
    if kinds is None:
        return None
    letters = {SLIDING: LOCAL, FULL: GLOBAL}
    if not isinstance(kinds, list):
        raise HuggingFaceError(f"{s.path}: layer_types = {kinds!r}: must be a list.")
    unknown = [kind for kind in kinds if kind not in letters]
    if unknown or len(kinds) != layers:
        rule = f"{unknown[0]!r} is not supported" if unknown else f"has {len(kinds)} items for {layers} layers"
        raise HuggingFaceError(f"{s.path}: layer_types: {rule}. Known: {', '.join(letters)}.")
    return "".join(letters[kind] for kind in kinds)


def _window(letters: str, window: int | None, path: str) -> dict[str, Any]:
    """Return `sliding_window` and `attention_pattern` of config.Model from a letter for each layer."""
    if LOCAL not in letters:
        return {"sliding_window": 0, "attention_pattern": ""}
    if not isinstance(window, int) or window < 1:
        rule = "must be a whole number above 0, since some layers see a sliding window"
        raise HuggingFaceError(f"{path}: sliding_window = {window!r}: {rule}.")
    pattern = windows.pattern_of(letters)
    return {"sliding_window": window, "attention_pattern": "" if pattern == LOCAL else pattern}


def _write_layer_types(model: Model) -> list[str]:
    return [SLIDING if kind == LOCAL else FULL for kind in model.kinds]


def window_by_layer(pattern: str) -> Part:
    """Return the part for a family in which some layers have a sliding window.

    pattern: letters of layers, "l" (window) or "g" (full attention), repeated over the layers. If config.json has
      `layer_types`, `pattern` is ignored.
    """

    def read(s: Settings, layers: int) -> dict[str, Any]:
        window = s.nullable("sliding_window")
        return _window(_layer_types(s, layers) or (pattern * layers)[:layers], window, s.path)

    def write(model: Model) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window or None, "layer_types": _write_layer_types(model)}

    return Part(read, write)


def window_of_all_layers(read: Callable[[Settings], int | None]) -> Part:
    """Return the part for a family in which all layers have the same window or none. read: returns the window, or None."""

    def of(s: Settings, layers: int) -> dict[str, Any]:
        window = read(s)
        return _window((LOCAL if window else GLOBAL) * layers, window, s.path)

    return Part(of, lambda model: {"sliding_window": model.sliding_window or None})


def _read_qwen_windows(s: Settings, layers: int) -> dict[str, Any]:
    s.only("use_mrope", False, "positions are numbers, not places in pictures")
    in_use = s.take("use_sliding_window", False)
    letters = _layer_types(s, layers)
    if in_use:
        window, first = s.nullable("sliding_window"), layers if letters else s.whole("max_window_layers")
        s.take("max_window_layers", None)
    else:
        window, first = s.take("sliding_window", None), s.take("max_window_layers", layers)
    by_number = "".join(LOCAL if in_use and window and i >= first else GLOBAL for i in range(layers))
    return _window(letters or by_number, window if in_use else None, s.path)


def _write_qwen_windows(model: Model) -> dict[str, Any]:
    letters = model.kinds
    first = letters.find(LOCAL)
    return {
        "use_sliding_window": LOCAL in letters,
        "sliding_window": model.sliding_window or None,
        "max_window_layers": first if first >= 0 else model.num_layers,
        "layer_types": _write_layer_types(model),
    }


# Layers have a window by `layer_types`. Without that key, as in earlier versions, all layers from `max_window_layers` on do.
QWEN_WINDOWS = Part(_read_qwen_windows, _write_qwen_windows)


# ---- Gemma


def gemma_part(pattern: Callable[[Settings], str], cap: Callable[[Settings], float]) -> Part:
    """Return the `Part` for Gemma 2 and 3.

    Args:
      pattern: returns the letters of layers, as in `window_by_layer`.
      cap: returns the soft cap of attention's logits; 0 for none.
    """

    def read(s: Settings, layers: int) -> dict[str, Any]:
        s.only("use_bidirectional_attention", False, "jaxtrain has causal attention only")
        window = s.nullable("sliding_window")
        s.only("sliding_window_size", window, f"sliding_window is {window!r}, and both mean the same")
        without_types = (pattern(s) * layers)[:layers]
        divisor = s.number("query_pre_attn_scalar")
        if divisor <= 0:
            raise HuggingFaceError(f"{s.path}: query_pre_attn_scalar = {divisor:g}: must be above 0.")
        return {
            "attn_logit_scale": divisor**-0.5,
            "attention_softcap": cap(s),
            "logit_softcap": float(s.nullable("final_logit_softcapping") or 0.0),
            **_window(_layer_types(s, layers) or without_types, window, s.path),
        }

    def write(model: Model) -> dict[str, Any]:
        divisor = float(f"{(model.attn_logit_scale or model.head_dim**-0.5) ** -2:.12g}")
        return {
            # transformers requires the type int if the value is whole.
            "query_pre_attn_scalar": int(divisor) if divisor == int(divisor) else divisor,
            "attn_logit_softcapping": model.attention_softcap or None,
            "final_logit_softcapping": model.logit_softcap or None,
            "sliding_window": model.sliding_window or None,
            "layer_types": _write_layer_types(model),
        }

    return Part(read, write)


# ---- Experts


def read_experts_per_token(s: Settings, experts: int) -> dict[str, Any]:
    """Return `num_experts` and `experts_per_token` of config.Model."""
    chosen = s.whole("num_experts_per_tok")
    if chosen > experts:
        raise HuggingFaceError(f"{s.path}: num_experts_per_tok = {chosen}: there are only {experts} experts.")
    return {"num_experts": experts, "experts_per_token": chosen}
