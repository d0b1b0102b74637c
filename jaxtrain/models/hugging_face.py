"""The format of a family's Hugging Face checkpoints: tables of keys of config.json and of tensors. Imports no jax.

config.json is read and written by the same table (hf_keys.py). Tables of tensors are in hf_tensors.py.

config.json has two forms. transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes both in
`rope_parameters`, by type of layer if layers differ. Both forms are read, and an export contains both. A missing key is an
error if transformers' default for that key would silently change the logits.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import DELTA, GLOBAL, LOCAL, Model
from jaxtrain.models import FAMILIES, family, windows
from jaxtrain.models.hf_keys import (
    ABOVE_0,
    ANY,
    FAMILY,
    FLAG,
    INT32,
    LAYERS,
    NUMBER,
    OBJECT,
    POSITIVE,
    REQUIRED,
    Flags,
    HfConfig,
    HfKey,
    HfRow,
    HuggingFaceError,
    Settings,
    ValueKind,
    alias,
    import_with,
    only,
    read_rows,
    write_rows,
)
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.not_supported import NOT_SUPPORTED, OTHER_TEXT, SAME

RAW = "jaxtrain"  # model_type of a folder with jaxtrain's own names and settings
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
PARTIAL = "partial_rotary_factor"  # the key of config.json and of config.Model
TEXT = "text_config"  # key of the config.json of a model that also sees or hears: the config.json of its text part
# Keys beside TEXT that count for the text part.
TOP_LEVEL_KEYS = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
GENERATES = ("ForConditionalGeneration", "ForCausalLM")  # suffixes of classes with a language model's head


# ---- Rotary embeddings


FACTOR = {"factor": HfKey("rope_factor", NUMBER)}
ORIGINAL = {"original_max_position_embeddings": HfKey("rope_original_len")}
# model.rope_scaling -> the keys of this rope_type; that of none is default.
ROPE_TYPES: dict[str, dict[str, HfKey]] = {
    "none": {},
    "llama3": {
        **FACTOR,
        "low_freq_factor": HfKey("rope_low_freq", NUMBER),
        "high_freq_factor": HfKey("rope_high_freq", NUMBER),
        **ORIGINAL,
    },
    "linear": {**FACTOR},
    "yarn": {
        **FACTOR,
        **ORIGINAL,
        # transformers also reads 0 as the default.
        "beta_fast": HfKey("rope_beta_fast", NUMBER, 32.0, to_model=lambda value, _: value or 32.0),
        "beta_slow": HfKey("rope_beta_slow", NUMBER, 1.0, to_model=lambda value, _: value or 1.0),
        "truncate": HfKey("rope_truncate", FLAG, True),
        **{key: HfKey(f"rope_{key}", NUMBER, 0.0, 0.0) for key in ("attention_factor", "mscale", "mscale_all_dim")},
    },
}


@dataclasses.dataclass(frozen=True)
class Rope(HfRow):
    """The rotary settings in both forms.

    Attributes:
        local: transformers 4's key with the base of layers with a sliding window, whose frequencies are not scaled. "": all
            layers have the same.
        rope_types: the values of rope_type.
        partial: the part of each head that is rotated, without the key for it; 0: whole heads always.
        fraction: returns the part outside of the other settings, or None.
    """

    local: str = ""
    rope_types: tuple[str, ...] = ("default", "llama3", "linear", "yarn")
    partial: float = 0.0
    fraction: Callable[[Settings], Any] = lambda s: s.take(PARTIAL, default=None)

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        base = settings.take(self.local, default=None) if self.local else None
        old = {"rope_theta": settings.hf_config.get("rope_theta"), **settings.take("rope_scaling", OBJECT, {})}
        if self.partial:
            old = {PARTIAL: self.fraction(settings), **old}
        new = settings.take(key, OBJECT, {})
        settings.take("rope_theta", default=None)
        if self.local:
            if unknown := sorted(new.keys() - {FULL, SLIDING}):
                rule = f"{key} has {unknown[0]!r}; it must have {FULL!r} and {SLIDING!r} alone"
                raise HuggingFaceError(f"{settings.path}: {rule}.")
            by_kind = Settings(new, f"{settings.path}: {key}")
            local = _merge_rotary(settings, {"rope_theta": base}, by_kind.take(SLIDING, OBJECT, {}))
            full = _merge_rotary(settings, old, by_kind.take(FULL, OBJECT, {}))
            out = _rope(full, settings.path, self.rope_types, lambda rotary: {FULL: rotary, SLIDING: local})
            local_keys = _rope(local, f"{settings.path}, {SLIDING}", ("default",), lambda rotary: {FULL: full, SLIDING: rotary})
            return out | {"local_rope_base": local_keys["rope_base"]}
        if FULL in new or SLIDING in new:
            layer_settings = [value for value in new.values() if value is not None]
            if any(value != layer_settings[0] for value in layer_settings):
                raise HuggingFaceError(f"{settings.path}: {key} = {new!r}: all layers of this family have the same.")
            new = layer_settings[0]
        return _rope(_merge_rotary(settings, old, new), settings.path, self.rope_types, partial=self.partial)

    def write(self, model: Model, key: str) -> dict[str, Any]:
        plain = model.rope_scaling == "none"
        scaling = {"rope_type": "default" if plain else model.rope_scaling}
        scaling |= {k: v for k, v in write_rows(ROPE_TYPES[model.rope_scaling], model).items() if v is not None}
        fraction = {PARTIAL: model.partial_rotary_factor} if self.partial else {}
        new = {"rope_theta": model.rope_base, **scaling, **fraction}
        out = {"rope_theta": model.rope_base, "rope_scaling": None if plain else scaling, **fraction, key: new}
        if self.local:
            local = model.local_rope_base or model.rope_base
            local_settings = {"rope_theta": local, "rope_type": "default"}
            out |= {self.local: local, key: {FULL: new, SLIDING: local_settings}}
        return out


def _merge_rotary(settings: Settings, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of config.json, merged from both of its forms. Settings in both forms must be equal."""
    old, new = ({{"type": "rope_type"}.get(k, k): v for k, v in x.items() if v is not None} for x in (old, new))
    diff = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    if diff:
        raise HuggingFaceError(
            f"{settings.path}: {diff[0]} is {old[diff[0]]!r} in the form of transformers 4 and {new[diff[0]]!r} in "
            "rope_parameters. Remove the wrong one."
        )
    return {**old, **new}


def _rope(
    rotary: Mapping[str, Any],
    path: str,
    rope_types: Sequence[str],
    replace_in: Callable[[Any], Any] = lambda rotary: rotary,
    partial: float = 0.0,
) -> dict[str, Any]:
    """Return keys of config.Model of rotary settings.

    rope_types, partial: as in `Rope`. replace_in: returns rope_parameters with these settings among those of all layers, for
    remedies.
    """

    def instead(rope_settings: Mapping[str, Any]) -> str:
        return import_with(path, "rope_scaling=null", f"rope_parameters={json.dumps(replace_in(rope_settings))}")

    settings = Settings(rotary, f"{path}, rotary settings")
    kind = settings.take("rope_type", default="default")
    kind = "default" if kind == "mrope" else kind  # the same with mrope_section
    if kind not in rope_types:
        # A packed row has documents of several lengths, and a cache has keys that were rotated when the sequence was shorter.
        why = ", because its frequencies follow the length of each sequence" * (kind in ("dynamic", "longrope"))
        plain = {"rope_type": "default", **{key: rotary.get(key) for key in ("rope_theta", *[PARTIAL] * (PARTIAL in rotary))}}
        short, fix = ". Up to max_position_embeddings tokens it equals default", f" Fix: {instead(plain)}."
        short, fix = (short, fix) if kind == "dynamic" else ("", "")
        raise HuggingFaceError(
            f"{path}: rope_type = {kind!r}: is not supported{why}{short}. Known: {', '.join(rope_types)}.{fix}"
        )
    if rotary.get("rope_theta") is None:
        raise HuggingFaceError(
            f"{path}: no rope_theta, neither by itself nor in rope_parameters. Add the base that the model was trained with; "
            f"transformers would silently use its default. Fix, for Llama 2: {import_with(path, 'rope_theta=10000.0')}."
        )
    scaling = "none" if kind == "default" else kind
    rows: dict[str, HfRow] = {
        PARTIAL: HfKey(PARTIAL, NUMBER, partial) if partial else only(1.0, "only whole heads are rotated"),
        "rope_theta": HfKey("rope_base", ABOVE_0),
        # Which of a token's three positions rotates which pair. In text the three are equal.
        "mrope_section": HfKey("", ANY, None),
        "mrope_interleaved": HfKey("", ANY, None),
    }
    out = {"rope_scaling": scaling, **read_rows(rows | ROPE_TYPES[scaling], settings)}
    if unknown := settings.unread():
        shown = ", ".join(f"{key} = {value!r}" for key, value in unknown.items())
        fix = instead({key: value for key, value in rotary.items() if key not in unknown})
        raise HuggingFaceError(f"{settings.path}: unknown {shown}. Fix, if it changes nothing: {fix}.")
    return out


# ---- Sliding windows


@dataclasses.dataclass(frozen=True)
class Windows(HfRow):
    """The window of a family in which some layers have one: those of `layer_types`, or of `letters` without that key.

    letters: returns a letter for each layer from config.json, "l" (window) or "g" (full attention), repeated over the layers.
    """

    letters: Callable[[Settings], str] = lambda s: GLOBAL

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        letters = self.letters(settings)
        return window_keys(settings, layer_letters(settings) or letters, settings.take(key, null=None))

    def write(self, model: Model, key: str) -> dict[str, Any]:
        kinds = [SLIDING if kind == LOCAL else FULL for kind in model.kinds]
        return {key: model.sliding_window or None, "layer_types": kinds}


class QwenWindows(Windows):
    """The window of Qwen2 and Qwen3: without `layer_types`, as in earlier versions, of layers from `max_window_layers` on."""

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        in_use, letters = settings.take("use_sliding_window", default=False), layer_letters(settings)
        window = settings.take(key, default=REQUIRED if in_use else None, null=None)
        by_number = in_use and not letters
        first = settings.take("max_window_layers", POSITIVE) if by_number else settings.take("max_window_layers", default=0)
        if by_number and window:
            letters = "".join(LOCAL if i >= first else GLOBAL for i in range(settings.hf_config["num_hidden_layers"]))
        return window_keys(settings, letters or GLOBAL, window if in_use else None)

    def write(self, model: Model, key: str) -> dict[str, Any]:
        first = model.kinds.find(LOCAL)
        more = {"use_sliding_window": first >= 0, "max_window_layers": first if first >= 0 else model.num_layers}
        return super().write(model, key) | more


class DeltaLayers(HfRow):
    """The layers with gated delta nets: those of `layer_types`, or without it all but each full_attention_interval-th one."""

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        layers, every = settings.hf_config["num_hidden_layers"], settings.take("full_attention_interval", POSITIVE, 0)
        by_number = "".join(DELTA if (i + 1) % (every or 4) else GLOBAL for i in range(layers))
        letters = layer_letters(settings, {LINEAR: DELTA, FULL: GLOBAL}) or by_number
        if every and letters != by_number:
            raise HuggingFaceError(
                f"{settings.path}: {key} and full_attention_interval = {every} differ. Remove the wrong one."
            )
        pattern = windows.pattern_of(letters)
        return {"attention_pattern": "" if pattern == GLOBAL else pattern}

    def write(self, model: Model, key: str) -> dict[str, Any]:
        return {key: [LINEAR if kind == DELTA else FULL for kind in model.kinds]}


def layer_letters(settings: Settings, letters: Mapping[str, str] = {SLIDING: LOCAL, FULL: GLOBAL}) -> str:
    """Return a letter for each layer from `layer_types`; "" without that key. letters: by value of layer_types."""
    kinds = settings.take("layer_types", default=None)
    if kinds is None:
        return ""
    layers = settings.hf_config["num_hidden_layers"]
    if not isinstance(kinds, list):
        raise HuggingFaceError(f"{settings.path}: layer_types = {kinds!r}: must be a list.")
    unknown = [kind for kind in kinds if kind not in [*letters]]
    if unknown or len(kinds) != layers:
        rule = f"{unknown[0]!r} is not supported" if unknown else f"has {len(kinds)} items for {layers} layers"
        raise HuggingFaceError(f"{settings.path}: layer_types: {rule}. Known: {', '.join(letters)}.")
    return "".join(letters[kind] for kind in kinds)


def window_keys(settings: Settings, letters: str, window: Any) -> dict[str, Any]:
    """Return `sliding_window` and `attention_pattern` of config.Model. letters: of layers, repeated over them."""
    layers = settings.hf_config["num_hidden_layers"]
    pattern = windows.pattern_of((letters * layers)[:layers])
    if LOCAL not in pattern:
        return {"sliding_window": 0, "attention_pattern": "" if pattern == GLOBAL else pattern}
    if not POSITIVE.allows(window, settings.hf_config):
        rule = f"{POSITIVE.rule}, since some layers see a sliding window"
        raise HuggingFaceError(f"{settings.path}: sliding_window = {window!r}: {rule}.")
    return {"sliding_window": window, "attention_pattern": "" if pattern == LOCAL else pattern}


# ---- Families


def head_width(hf_config: HfConfig) -> int:
    """Return the width of a head for a config.json without head_dim."""
    return hf_config["hidden_size"] // hf_config["num_attention_heads"]


INIT_STD = Model().init_std
SILU, GELU = (f"models of this family are built with {name!r} only" for name in ("silu", "gelu_pytorch_tanh"))
# Rows of all families.
KEYS: dict[str, HfRow] = {
    "num_hidden_layers": HfKey("num_layers", LAYERS),
    "hidden_size": HfKey("d_model"),
    "num_attention_heads": HfKey("num_heads"),
    "num_key_value_heads": HfKey("num_kv_heads", POSITIVE, lambda hf_config: hf_config["num_attention_heads"]),
    "head_dim": HfKey("head_dim", POSITIVE, head_width),
    "intermediate_size": HfKey("d_ff"),
    "vocab_size": HfKey("vocab_size"),
    "rms_norm_eps": HfKey("norm_eps", NUMBER),
    "tie_word_embeddings": HfKey("tied_head", FLAG),
    "initializer_range": HfKey(
        "init_std", ANY, None, to_model=lambda value, _: value if isinstance(value, float) else INIT_STD
    ),
    "max_position_embeddings": HfKey("", INT32, None),
    "hidden_act": only("silu", SILU),
    "hidden_activation": only("silu", SILU, written=False),
    "attention_bias": only(False, "attention is built without biases", written=False),
    "mlp_bias": only(False, "the feed-forward block is built without biases", written=False),
    "attention_dropout": only(0.0, "jaxtrain has no dropout", fix=0.0),
    "quantization_config": only({}, "weights in this form are not read. Fix: name the model that was quantized", written=False),
    "rope_parameters": Rope(),
}


def _attention_divisor(model: Model) -> int | float:
    divisor = float(f"{(model.attn_logit_scale or model.head_dim**-0.5) ** -2:.12g}")
    return int(divisor) if divisor == int(divisor) else divisor  # transformers requires the type int if the value is whole


def quantization_row(method: str) -> HfRow:
    """Return the row of quantization_config of a family whose weights are also read in this form."""
    rule = f"weights of quant_method {method!r} are read, and no others that are quantized"
    return HfKey("", ValueKind(rule, lambda x, _: x == {} or isinstance(x, dict) and x.get("quant_method") == method), None)


# Rows that replace those of KEYS. transformers 4 omits tie_word_embeddings for the default of the class.
HEAD_DIM: dict[str, HfRow] = {"head_dim": HfKey("head_dim")}
TIED: dict[str, HfRow] = {"tie_word_embeddings": HfKey("tied_head", FLAG, True)}
UNTIED: dict[str, HfRow] = {"tie_word_embeddings": HfKey("tied_head", FLAG, False)}
BIASED: dict[str, HfRow] = {"attention_bias": Flags(("qkv_bias", "attention_out_bias"))}
MLP_BIASED: dict[str, HfRow] = {"mlp_bias": HfKey("mlp_bias", FLAG, False)}


QWEN_WINDOWS: dict[str, HfRow] = {
    "use_mrope": only(False, "positions are numbers, not places in pictures", written=False),
    "sliding_window": QwenWindows(),
}
GEMMA: dict[str, HfRow] = {
    **HEAD_DIM,
    **TIED,
    "hidden_act": only("gelu_pytorch_tanh", GELU, written=False),
    "hidden_activation": only("gelu_pytorch_tanh", GELU),
    "use_bidirectional_attention": only(False, "jaxtrain has causal attention only", written=False),
}
GEMMA_SCORES: dict[str, HfRow] = {
    "sliding_window_size": alias("sliding_window", lambda hf_config: hf_config.get("sliding_window")),
    "query_pre_attn_scalar": HfKey("attn_logit_scale", ABOVE_0, to_model=lambda x, _: x**-0.5, to_hf=_attention_divisor),
    "final_logit_softcapping": HfKey("logit_softcap", NUMBER, null=0.0),
}


@dataclasses.dataclass(frozen=True)
class Format:
    """The Hugging Face checkpoints of a family.

    Attributes:
        model_type: the value of model_type in config.json.
        architecture: the class name in transformers, in config.json.
        tensors: the checkpoint's tensors, by jaxtrain's names.
        keys: the rows of config.json's keys, in the order in which they are read.
        model: keys of config.Model with one value in all models of the family.
        written: further keys of config.json in an export, and their values.
        beyond: why tensors of layers after the last layer are not used; "": such tensors are an error.
        nested: the values of keys that a config.json as TEXT may lack: transformers 4 wrote there what differs from them.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, HfTensor]
    keys: Mapping[str, HfRow]
    model: Mapping[str, Any] = types.MappingProxyType({})
    written: Mapping[str, Any] = types.MappingProxyType({})
    beyond: str = ""
    nested: Mapping[str, Any] = types.MappingProxyType({})

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return keys of config.Model, from config.json. Raises HuggingFaceError for a value that jaxtrain does not support."""
        out = {**self.model, **read_rows(self.keys, settings)}
        if unknown := settings.unread():
            shown = ", ".join(f"{key} = {value!r}" for key, value in unknown.items())
            keys, they, do = ("key", "it", "does") if len(unknown) == 1 else ("keys", "they", "do")
            raise HuggingFaceError(
                f"{settings.path}: unknown {keys} {shown}. {they.capitalize()} may change what the model computes. Fix, if you "
                f"know that {they} {do} not: {import_with(settings.path, *(f'{key}=null' for key in unknown))}"
            )
        return out

    def unread(self, hf_config: HfConfig) -> list[str]:
        """Return the keys of a config.json that may change what the model computes, and that this format cannot read."""
        settings, refused = Settings(hf_config), []
        for key, row in self.keys.items():
            try:
                row.read(settings, key)
            except (HuggingFaceError, ArithmeticError, AttributeError, LookupError, TypeError):  # of another architecture
                refused += [key] * (key in hf_config)
        return sorted({*refused, *settings.unread()})

    def write(self, model: Model) -> dict[str, Any]:
        """Return keys of config.json. Settings of the model without a key in the format are lost.

        To find lost settings, compare `read` of the result with the model.
        """
        return {**write_rows(self.keys, model), **self.written}


def format_of(name: str) -> Format:
    """Return the `FORMAT` of a family, by its name in FAMILIES or as `package.module:name`.

    Raises:
        HuggingFaceError: the family has no FORMAT.
        ConfigError: the family cannot be imported.
    """
    declared = getattr(family(name), "FORMAT", None)
    if isinstance(declared, Format):
        return declared
    rule = "has no FORMAT, the table of its names in Hugging Face's checkpoints"
    rule = rule if declared is None else f"its FORMAT is {type(declared).__name__}, and no jaxtrain.models.hugging_face.Format"
    fix = to_run_sh("python -m jaxtrain hf export RUN --out=DIR --raw")
    raise HuggingFaceError(f"model.family = {name!r}: {rule}. Fix, for jaxtrain's names: {fix}.")


def family_of(hf_config: Mapping[str, Any], path: str) -> str:
    """Return the family of a config.json: the one in FAMILIES with its model_type, or the one that its key FAMILY names.

    path: of the config.json, for errors. Raises HuggingFaceError if there is none.
    """
    kind, outside = hf_config.get("model_type"), hf_config.get(FAMILY)
    if outside is not None:
        if not isinstance(outside, str) or not all(outside.partition(":")):
            raise HuggingFaceError(f"{path}: {FAMILY} = {outside!r}: must be package.module:name.")
        if (wanted := format_of(outside).model_type) != kind:
            raise HuggingFaceError(f"{path}: model_type = {kind!r}: the FORMAT of {FAMILY} = {outside!r} is for {wanted!r}.")
        return outside
    families = {format_of(name).model_type: name for name in FAMILIES}
    if isinstance(kind, str) and kind in families:
        return families[kind]
    if kind is None and isinstance(hf_config.get("model"), dict):
        raise HuggingFaceError(f"{path}: belongs to a run of jaxtrain. Use the run itself, or hf export it first.")
    raise HuggingFaceError(f"{path}: model_type = {kind!r}: {not_supported(hf_config, path)}")


def is_multimodal(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model that also sees or hears, and of no family as a whole."""
    kind, outside = hf_config.get("model_type"), hf_config.get(FAMILY)
    return isinstance(hf_config.get(TEXT), dict) and not (isinstance(outside, str) and format_of(outside).model_type == kind)


def text_config(
    hf_config: Mapping[str, Any], changes: Mapping[str, Any], path: str, has_head: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """Return the config.json that the text part of a model would have by itself.

    Args:
        hf_config: config.json of a model that also sees or hears.
        changes: keys of the result to add or replace.
        path: of the config.json, for errors.
        has_head: returns whether the folder has a head. Asked only if TEXT and `hf_config` differ on tie_word_embeddings:
            versions of transformers read one or the other.

    Raises:
        HuggingFaceError: the text part belongs to no family, or the whole model computes text in another way.
    """
    kind, architectures = hf_config.get("model_type"), hf_config.get("architectures") or [*GENERATES]
    if kind in OTHER_TEXT:
        raise HuggingFaceError(
            f"{path}: model_type = {kind!r}: {OTHER_TEXT[kind]}, which its text part alone does not compute."
        )
    if not (isinstance(architectures, list) and any(str(name).endswith(GENERATES) for name in architectures)):
        raise HuggingFaceError(f"{path}: architectures = {architectures!r}: none of them is a language model.")
    text, top_level = dict(hf_config[TEXT]), {key: hf_config[key] for key in TOP_LEVEL_KEYS if hf_config.get(key) is not None}
    tied = "tie_word_embeddings"
    if {text.get(tied), top_level.get(tied)} == {True, False}:
        top_level[tied] = not has_head()
    text |= top_level | {"architectures": None} | dict(changes)
    nested = dict(format_of(family_of(text, f"{path}: {TEXT}")).nested)
    if "rope_parameters" in text:
        nested = {key: value for key, value in nested.items() if not key.startswith("rope_")}
    return nested | text


def not_supported(hf_config: Mapping[str, Any], path: str) -> str:
    """Return the nearest family of a config.json whose model_type is that of none, what the family lacks, and a fix."""
    kind = str(hf_config.get("model_type"))
    own_family = f"Fix, for a family of your own: {import_with(path, f'{FAMILY}=package.module:name')}."
    if kind in SAME:
        same_type = import_with(path, f"model_type={format_of(SAME[kind]).model_type}", "architectures=null")
        return f"its text is computed as that of the family {SAME[kind]}. Fix: {same_type}."
    if kind in NOT_SUPPORTED:
        nearest, lacks = NOT_SUPPORTED[kind]
        return f"no family of jaxtrain. The nearest is {nearest}, which lacks {lacks}. {own_family}"
    formats = {name: format_of(name) for name in FAMILIES}
    unread = {name: layout.unread(hf_config) for name, layout in formats.items()}
    # Of families that read as many of its keys, the one whose table has the fewest others.
    nearest = min(unread, key=lambda name: (len(unread[name]), len(formats[name].keys.keys() - hf_config.keys())))
    lacks = f"cannot read {', '.join(unread[nearest])}" if unread[nearest] else "reads all of them"
    return f"no family of jaxtrain. By its keys (a guess), the nearest is {nearest}, which {lacks}. {own_family}"
