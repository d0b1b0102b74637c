"""Text from a trained model, token by token; sample.py is its command.

The model has the attention code of training, and a key/value cache. Weights stay sharded; the sequence is replicated.
"""

import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import DELTA, ConfigError, Problem, RunConfig
from jaxtrain.data import text_format
from jaxtrain.data.chat_template import ChatTemplate, Conversation, load_template
from jaxtrain.data.prepare import encode_pieces
from jaxtrain.data.rows import Piece
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import read_params, shard_for_inference
from jaxtrain.kernels.attention import Hardware, support
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.metrics.samples import Sampling, split_prompts
from jaxtrain.models.attention import Kernel, cached_arrays
from jaxtrain.models.module import Definition, Params
from jaxtrain.models.transformer import KVCache, empty_cache
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import Placement, make_placement
from jaxtrain.step.attention_specs import attention_specs
from jaxtrain.step.definition import for_inference, make_definition
from jaxtrain.step.program import make_pipeline


class Sampler:
    """A model ready to continue text.

    For each cache capacity, temperature and top_p, it compiles one program per prompt length and one for a single token.
    """

    def __init__(self, run: RunConfig, placement: Placement):
        run = for_inference(run)
        self.placement = dataclasses.replace(placement, tokens_replicated=True)  # one sequence is too short to shard
        # Each row of a cache is one document. Queries are the newest tokens only, which flash kernels do not support.
        # Attention is limited to the distances of training, since rotary angles beyond them were not trained.
        specs = tuple(
            dataclasses.replace(spec, packed=True, cached=True, window=min(spec.window or run.data.seq_len, run.data.seq_len))
            for spec in attention_specs(run.model, run.data, run.compute, run.train.deterministic)
        )
        name, _ = support.choose_attention(
            "auto", [(spec, 1) for spec in specs], Hardware.from_device(placement.mesh.devices.flat[0])
        )
        self.definition = make_definition(run, make_zero(run.sharding, self.placement), Kernel(name, specs))
        check_decodes(run.model.family, run.sample.max_tokens, self.definition)
        self._pipe = make_pipeline(run.model, self.placement, self.definition)
        self._num_slots = placement.layout.stages.slots if self._pipe else 0
        self.run = run
        self._dtype = DTYPES[run.compute]
        specs = self.definition.specs(self.placement), self.cache_specs, P()
        self.decode = self.placement.shard_map(self._decode, specs, (P(), self.cache_specs))
        self._extend = jax.jit(self._step, static_argnums=(5, 6), donate_argnums=1)

    @property
    def cache_specs(self) -> Any:
        """Return the PartitionSpecs of a key/value cache."""
        model = self.run.model
        _, heads = cached_arrays(model, self.placement)
        kv, dense_kv = (self.placement.spec((*first, None, None, heads, None)) for first in (("layers",), ()))
        state = self.placement.spec(("layers", None, "heads", None, None))
        conv_spec = self.placement.spec(("layers", None, None, "heads", None))
        layer_specs = [(state, *(conv_spec,) * 3) if letter == DELTA else (kv, kv) for letter in model.kinds[: model.period]]
        cache_type: Any = KVCache
        stack_spec = tuple(layer_specs) if model.period > 1 else layer_specs[0]
        return cache_type(stack_spec, ((dense_kv, dense_kv),) * model.dense_layers, P(), P(), P())

    def _decode(self, params: Params, cache: KVCache, tokens_BT: jax.Array) -> tuple[jax.Array, KVCache]:
        """Return the logits of the token that follows `tokens_BT`, f32 (B, V), and the cache with `tokens_BT` added."""
        model = self.definition.bind(params)
        hidden, cache = self._pipe.decode(model, tokens_BT, cache) if self._pipe else model.decode(tokens_BT, cache)
        return model.logits(hidden[:, -1:])[:, 0], cache

    def _step(self, params, cache, tokens_BT, key, index, temperature: float, top_p: float):
        logits_BV, cache = self.decode(params, cache, tokens_BT)
        return sample_token(logits_BV[0], jax.random.fold_in(key, index), temperature, top_p), cache

    def empty_cache(self, rows: int, room: int) -> KVCache:
        """Return an empty key/value cache on the devices, for `rows` sequences of up to `room` tokens."""
        empty = empty_cache(self.run.model, self.placement, rows, room, self._dtype, self._num_slots)
        return jax.device_put(empty, jax.tree.map(lambda spec: NamedSharding(self.placement.mesh, spec), self.cache_specs))

    def tokens(
        self,
        params: Params,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        room: int = 0,
    ) -> Iterator[int]:
        """Yield `max_tokens` ids that continue the prompt. The caller may stop earlier.

        prompt: at least one id. room: least capacity of the cache, in tokens. Prompts with the same capacity share the compiled
        single-token step.
        """
        # Lengths are rounded up so that prompts of similar length share one compiled step.
        room = -(-max(len(prompt) + max_tokens, room) // 64) * 64
        cache = self.empty_cache(1, room)
        key = jax.random.key(seed)
        new = jnp.asarray([list(prompt)], jnp.int32)
        for i in range(max_tokens):
            token, cache = self._extend(params, cache, new, key, i, temperature, top_p)
            yield int(token)
            new = token.reshape(1, 1)


def check_decodes(family: str, max_tokens: int, definition: Definition) -> None:
    """Raise ConfigError for a model from outside the package that has no decode(), which samples need."""
    if not definition.decodes:
        rule = f"the {family} model has no decode() and logits(), which write samples"
        raise ConfigError([Problem("sample.max_tokens", max_tokens, rule, "Set 0.")])


def sample_token(logits_V: jax.Array, key: jax.Array, temperature: float, top_p: float) -> jax.Array:
    """Return one token id, int32 (). temperature 0 takes the likeliest token. Otherwise draw from softmax(logits /
    temperature), limited to the smallest set of likeliest tokens whose probabilities reach top_p (Holtzman et al. 2020,
    arXiv:1904.09751).
    """
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    order = jnp.argsort(-logits_V)
    probabilities = jax.nn.softmax(logits_V[order] / temperature)
    before = jnp.cumsum(probabilities) - probabilities
    nucleus = jnp.where(before < top_p, jnp.log(probabilities), -jnp.inf)
    return order[jax.random.categorical(key, nucleus)].astype(jnp.int32)


def continue_text(
    sampler: Sampler, params: Params, tokenizer: Any, sampling: Sampling, room: int = 0, *, stops: Sequence[int]
) -> str:
    """Return the prompt and its continuation, which ends before the first of `stops`, or else after max_tokens.

    stops: ids. room: as in `Sampler.tokens`.
    """
    prompt = prompt_ids(tokenizer, sampling.prompt, sampler.run.model.vocab_size)
    ids = continue_ids(sampler, params, prompt, sampling, stops, room)
    return tokenizer.decode([*prompt[len(tokenizer.bos) :], *ids])


def continue_ids(
    sampler: Sampler, params: Params, prompt: Sequence[int], sampling: Sampling, stops: Sequence[int], room: int = 0
) -> list[int]:
    """Return the ids that continue a prompt of ids, up to the first of `stops`, which is left out, or max_tokens of them."""
    ids: list[int] = []
    options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    for token in sampler.tokens(params, prompt, max_tokens=sampling.max_tokens, room=room, **options):
        if token in stops:
            break
        ids.append(token)
    return ids


def prompt_ids(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """Return the ids of a prompt as the beginning of a document; if the prompt has no ids, the ids of a newline.

    Raises TokenizerError for an id that the model does not have (another tokenizer than in training), and if there is no id.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the prompt {prompt!r} has half a surrogate pair at character {error.start + 1}") from error
    ids = [*tokenizer.bos, *tokenizer.encode(prompt)] or tokenizer.encode("\n")
    if not ids:
        raise TokenizerError(f"tokenizer {tokenizer.name!r} makes no token of the prompt {prompt!r}: give another prompt")
    check_vocabulary(tokenizer, ids, vocab_size)
    return ids


def check_vocabulary(tokenizer: Any, ids: Sequence[int], vocab_size: int) -> None:
    """Raise TokenizerError for an id that the model does not have."""
    if max(ids) >= vocab_size:
        raise TokenizerError(
            f"tokenizer {tokenizer.name!r} gives the id {max(ids)} for the prompt {tokenizer.decode(ids)!r}, and the model has "
            f"{vocab_size}. Name the tokenizer that it was trained with."
        )


def continue_all(sampler: Sampler, params: Params, tokenizer: Any, sampling: Sampling, stops: Sequence[int]) -> list[str]:
    """Return the prompt and its continuation for each of the prompts in `ask.prompt`."""
    requests = [dataclasses.replace(sampling, prompt=prompt) for prompt in split_prompts(sampling.prompt)]
    vocab_size = sampler.run.model.vocab_size
    room = max(len(prompt_ids(tokenizer, request.prompt, vocab_size)) for request in requests) + sampling.max_tokens
    return [continue_text(sampler, params, tokenizer, request, room, stops=stops) for request in requests]


class LoadedModel(NamedTuple):
    """A model that generates text: config, sampler, weights, step, and how its texts end."""

    run: RunConfig
    sampler: Sampler
    params: Params
    step: int
    text: TextFormat


def load_model(path: str, devices: Sequence[Any], base: str = "", ema: bool = False) -> LoadedModel:
    """Load a run, one checkpoint, or a Hugging Face folder, as `open_origin` opens it.

    For a run with adapters, the weights are those of the base model and the adapters. base: the base model's folder, if it was
    moved. ema: use the averages of the weights. Raises CheckpointError or HuggingFaceError if weights or config cannot be
    read, or the config is of another version, and ConfigError if there are no averages.
    """
    source = open_origin(path).choose(ema)
    source.announce()
    run = source.run()
    sharded_run = shard_for_inference(run, devices)
    sampler = Sampler(run, make_placement(sharded_run, devices[: sharded_run.mesh.fsdp]))
    return LoadedModel(
        run, sampler, read_params(source, run, sampler.definition, sampler.placement, base), source.step, source.text()
    )


class Chat:
    """The tokenizer and the chat template by which a model answers conversations."""

    def __init__(self, text: TextFormat, spec: str, template: str = ""):
        """Read tokenizer and template, without the model's weights.

        Args:
          text: the model's text format.
          spec: its tokenizer.
          template: a name in chat_template.BUILTIN_TEMPLATES, or a file; "": the model's own.

        Raises:
          TokenizerError: the tokenizer cannot be read, or there is no chat template.
        """
        if spec == "byte" and not text.tokenizer_sha256:
            raise TokenizerError("the model has no tokenizer. Fix: name its folder, --tokenizer=DIR")
        self.tokenizer, text = text_format.load_with_tokenizer(text, spec)
        date = datetime.date.today().isoformat()
        model_template = None if template else text.chat_template(self.tokenizer.control_tokens(), date)
        self.template: ChatTemplate = model_template or load_template(spec, self.tokenizer, template, date)
        # A template that was not that of the training may end turns by a token that no file of the model names.
        self.stops = tuple({*text.stops, *self.template.turn_ends()})

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation with the beginning of an answer. Raises RowError if the template cannot write it."""
        ((ids, _, _),) = encode_pieces(self.tokenizer, [Piece("", 0, chunks=tuple(self.template.split_prompt(conversation)))])
        return ids.tolist()

    def answer(self, model: LoadedModel, conversation: Conversation, sampling: Sampling) -> str:
        """Return a model's answer to a conversation, up to the end of the turn or max_tokens.

        Raises RowError as `prompt`, and TokenizerError for an id that the model does not have.
        """
        ids = self.prompt(conversation)
        check_vocabulary(self.tokenizer, ids, model.run.model.vocab_size)
        return self.tokenizer.decode(continue_ids(model.sampler, model.params, ids, sampling, self.stops))
