"""How keys of a Hugging Face config.json are read and written: by tables, each key with its `HfRow`. Imports no jax."""

import abc
import dataclasses
import json
import shlex
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import Model

OWN_SECTION = "jaxtrain_own"  # key of config.json with the section `own` of a config
FAMILY = "jaxtrain_family"  # key of config.json with a family from outside the package, package.module:name
# Keys without effect on the logits: keys for training, for transformers itself, and of tools.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
        *("pretraining_tp", "id2label", "label2id", "problem_type", "return_dict", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "cache_implementation"),
        *("transformers.js_config", "hidden_dropout", "auto_map", "_sliding_window_pattern"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_experts_implementation"),
        *("experts_implementation", "_flash_attn_2_enabled", "use_flash_attention", "use_flash_attn"),
        *("output_router_logits", "router_aux_loss_coef", "num_mtp_layers", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("is_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "finetuning_task", "num_labels"),
        *("task_specific_params", "tokenizer_class", "processor_class", "prefix", "sep_token_id", "decoder_start_token_id"),
        *("gradient_checkpointing", "loss_type", "_commit_hash", "max_sequence_length", "model_max_length"),
        *("tie_last_hidden_states", "is_llama_config", FAMILY, OWN_SECTION),
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
REQUIRED: Any = object()  # in place of a default
HfConfig = Mapping[str, Any]


class HuggingFaceError(ValueError):
    """An unsupported Hugging Face folder, or a model without a Hugging Face format. The message names the key or tensor."""


class ValueKind(NamedTuple):
    """The values that a key may have.

    Attributes:
        rule: the rule, in the error.
        allows: returns whether a value keeps the rule, from the value and all of config.json.
        fix: the value in the command that the error names. REQUIRED: it names none.
    """

    rule: str
    allows: Callable[[Any, HfConfig], bool]
    fix: Any = REQUIRED


ANY = ValueKind("", lambda x, _: True)
POSITIVE = ValueKind("must be a whole number above 0", lambda x, _: type(x) is int and x > 0)
LAYERS = ValueKind("must be a whole number from 1 to 10,000", lambda x, _: type(x) is int and 0 < x <= 10_000)
INT32 = ValueKind("must be a whole number from 1 to 2^31 - 1", lambda x, _: type(x) is int and 0 < x < 2**31)
COUNT = ValueKind("must be a whole number", lambda x, _: type(x) is int and x >= 0)
NUMBER = ValueKind("must be a finite number", lambda x, _: type(x) in (int, float) and abs(x) <= sys.float_info.max)
ABOVE_0 = ValueKind("must be a finite number above 0", lambda x, _: NUMBER.allows(x, _) and x > 0)
FLAG = ValueKind("must be true or false", lambda x, _: isinstance(x, bool))
OBJECT = ValueKind("must be an object of JSON, or null", lambda x, _: isinstance(x, dict))


class Settings:
    """A config.json during reading: every key that is read is removed, so that unknown keys remain."""

    def __init__(self, values: HfConfig, path: str = "config.json"):
        self.path = path
        self.hf_config = types.MappingProxyType(dict(values))
        self._remaining = dict(values)

    def take(self, key: str, kind: ValueKind = ANY, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return the value of a key.

        Args:
            key: the key.
            kind: the kind of its values other than `default` and `null`.
            default: the value if the key is missing, or a function of `hf_config`. REQUIRED: the key may not be missing.
            null: the value that null stands for. REQUIRED: `default`.

        Raises:
            HuggingFaceError: there is no value, or one of another kind.
        """
        value = self._remaining.get(key)
        stands_for = value is None
        if stands_for:
            value = default if key not in self._remaining or null is REQUIRED else null
            value = value(self.hf_config) if callable(value) else value
        self._remaining.pop(key, None)
        if value is REQUIRED:
            more = "" if null is REQUIRED else " (null: without)"
            fix = f"Fix, with what the model was trained with{more}: {import_with(self.path, f'{key}=VALUE')}."
            is_section = not self.path.endswith("config.json")
            fix = "Add it, with what the model was trained with." if is_section else fix
            raise HuggingFaceError(f"{self.path}: no key {key!r}. {fix}")
        if not stands_for and not kind.allows(value, self.hf_config):
            fix = "" if kind.fix is REQUIRED else f" Fix: {import_with(self.path, f'{key}={json.dumps(kind.fix)}')}."
            raise HuggingFaceError(f"{self.path}: {key} = {value!r:.200}: {kind.rule}.{fix}")
        return value

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read and may change the logits."""
        windows = ("sliding_window", "max_window_layers") if self._remaining.get("use_sliding_window") is False else ()
        return {k: value for k, value in sorted(self._remaining.items()) if k not in windows and not _without_effect(k, value)}


def _without_effect(key: str, value: Any) -> bool:
    if value is None or key in WITHOUT_EFFECT or key in GENERATION or key.startswith(PREFIXES):
        return True
    if isinstance(value, list):  # a value for each layer
        return key in NEUTRAL and all(each == NEUTRAL[key] for each in value)
    return key in NEUTRAL and value == NEUTRAL[key] and isinstance(value, bool) == isinstance(NEUTRAL[key], bool)


def import_with(path: str, *changes: str) -> str:
    """Return the command that imports a folder with other keys of config.json, whose result every command takes.

    path: of the config.json.
    """
    folder = shlex.quote(path.partition("config.json")[0].rstrip("/") or "DIR")
    options = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    return to_run_sh(f"python -m jaxtrain hf import {folder} --out=RUN {options}; then use RUN")


class HfRow(abc.ABC):
    """A row of a table: how a key of config.json is read and written, perhaps with further keys."""

    @abc.abstractmethod
    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        """Return keys of config.Model. Raises HuggingFaceError for a value that jaxtrain does not support."""

    @abc.abstractmethod
    def write(self, model: Model, key: str) -> dict[str, Any]:
        """Return keys of config.json."""


@dataclasses.dataclass(frozen=True)
class HfKey(HfRow):
    """A key that has the meaning of one key of config.Model, or none there.

    Attributes:
        model_key: the key of config.Model; "": the value is checked, and not used.
        kind, default, null: as in `Settings.take`. An export of a model with the value `null` has null.
        to_model: returns the value of config.Model from that of config.json, and all of config.json.
        to_hf: returns the value of config.json from the model. None: the value of `model_key`; without it none is written.
        written: whether an export has the key.
    """

    model_key: str = ""
    kind: ValueKind = POSITIVE
    default: Any = REQUIRED
    null: Any = REQUIRED
    to_model: Callable[[Any, HfConfig], Any] = lambda value, _: value
    to_hf: Callable[[Model], Any] | None = None
    written: bool = True

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        value = settings.take(key, self.kind, self.default, self.null)
        return {self.model_key: self.to_model(value, settings.hf_config)} if self.model_key else {}

    def write(self, model: Model, key: str) -> dict[str, Any]:
        if not self.written or not (self.model_key or self.to_hf):
            return {}
        value = self.to_hf(model) if self.to_hf else getattr(model, self.model_key)
        return {key: None if value == self.null else value}


@dataclasses.dataclass(frozen=True)
class Flags(HfRow):
    """A flag that sets several flags of config.Model; false if it is missing."""

    model_keys: tuple[str, ...]

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        return dict.fromkeys(self.model_keys, settings.take(key, FLAG, False))

    def write(self, model: Model, key: str) -> dict[str, Any]:
        return {key: getattr(model, self.model_keys[0])}


def only(value: Any, why: str, written: bool = True, fix: Any = REQUIRED) -> HfKey:
    """Return the row of a key that must have one value, or be missing. why: the error's reason. fix: as in `ValueKind`."""
    kind = ValueKind(why, lambda x, _: x == value, fix)
    return HfKey("", kind, None, to_hf=lambda model: value, written=written)


def alias(keys: str, value: Callable[[HfConfig], Any]) -> HfKey:
    """Return the row of a second key with the meaning of others. keys: these others. value: returns what they say."""
    return HfKey(
        "",
        ValueKind(f"is not {keys}, and both mean the same. Remove the wrong one", lambda x, hf_config: x == value(hf_config)),
        None,
    )


def read_rows(rows: Mapping[str, HfRow], settings: Settings) -> dict[str, Any]:
    """Return keys of config.Model, from config.json. Raises HuggingFaceError for a value that jaxtrain does not support."""
    return {model_key: value for key, row in rows.items() for model_key, value in row.read(settings, key).items()}


def write_rows(rows: Mapping[str, HfRow], model: Model) -> dict[str, Any]:
    """Return keys of config.json. Settings of the model without a key in the table are lost."""
    return {hf_key: value for key, row in rows.items() for hf_key, value in row.write(model, key).items()}
