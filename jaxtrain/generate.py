"""Text from a trained model, token by token; sample.py is its command.

The model is the one that was trained, with the same attention code and a key/value cache. Weights stay split over the
devices, the one sequence is on all of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import config
from jaxtrain.config import RunConfig
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.hf.model import alone, read_params, run_at
from jaxtrain.kernels import attention
from jaxtrain.kernels.dot import DTYPES
from jaxtrain.models.attention import Kernel
from jaxtrain.models.module import Params
from jaxtrain.models.transformer import empty_cache
from jaxtrain.pipeline import KEYS, STAGE
from jaxtrain.samples import prompts
from jaxtrain.sharding import Placement, make_placement, replicated
from jaxtrain.stages import arrangement
from jaxtrain.step import attention_specs, dropless, hardware_of, make_definition, pipeline

# Axes of activations, which hold one sequence here: too little to split.
WHOLE = ("batch", "sequence", "residual")


class Sampler:
    """A model ready to continue text. Compiles once per prompt length and once for the single-token step."""

    def __init__(self, run: RunConfig, placement: Placement):
        run = dropless(run)
        rules = tuple((axis, () if axis in WHOLE else onto) for axis, onto in placement.rules)
        self.placement = dataclasses.replace(placement, rules=rules)
        # The rows of a cache are one document each; queries are the newest tokens only, which flash kernels do not do.
        # No token sees farther back than tokens did in training: rotary angles beyond that were never learnt.
        specs = tuple(
            dataclasses.replace(spec, packed=True, cached=True, window=min(spec.window or run.data.seq_len, run.data.seq_len))
            for spec in attention_specs(run)
        )
        name, _ = attention.choose("auto", [(spec, 1) for spec in specs], hardware_of(placement.mesh.devices.flat[0]))
        kernel, lying = Kernel(name, specs), arrangement(run, placement.size(STAGE))
        self.definition = make_definition(run, self.placement, kernel)
        self._pipe = pipeline(run, self.placement, kernel, lying) if lying else None
        self._places = lying.places if lying else 0
        self.run = run
        self._dtype = DTYPES[run.compute]
        self._extend = jax.jit(self._step, static_argnums=(5, 6), donate_argnums=1)

    def _step(self, params, cache, tokens_BT, key, index, temperature: float, top_p: float):
        if self._pipe:
            logits_V, cache = self._pipe.decode(params, tokens_BT, cache)
        else:
            model = self.definition.bind(params)
            hidden, cache = model.decode(tokens_BT, cache)
            logits_V = model.logits(hidden[:, -1:])[0, 0]
        return choose(logits_V, jax.random.fold_in(key, index), temperature, top_p), cache

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
        """Token ids that continue the prompt (at least one id), one by one; the caller decides where to stop.

        room: tokens that the cache holds at least; prompts with the same room share the single-token step.
        """
        # Lengths are rounded up so that prompts of similar length share one compiled step.
        room = -(-max(len(prompt) + max_tokens, room) // 64) * 64
        empty = empty_cache(self.run.model, self.placement, 1, room, self._dtype, self._places)
        by_layer, whole = self.placement.sharding(("layers",)), replicated(self.placement)
        cache = jax.device_put(empty, jax.tree.map(lambda a: by_layer if a.ndim == KEYS else whole, empty))
        key = jax.random.key(seed)
        new = jnp.asarray([list(prompt)], jnp.int32)
        for i in range(max_tokens):
            token, cache = self._extend(params, cache, new, key, i, temperature, top_p)
            yield int(token)
            new = token.reshape(1, 1)


def choose(logits_V: jax.Array, key: jax.Array, temperature: float, top_p: float) -> jax.Array:
    """One token id, int32 (). temperature 0 takes the likeliest; otherwise a draw from softmax(logits / temperature), cut
    to the smallest set of likeliest tokens whose probabilities reach top_p (Holtzman et al. 2020, arXiv:1904.09751)."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    order = jnp.argsort(-logits_V)
    probabilities = jax.nn.softmax(logits_V[order] / temperature)
    before = jnp.cumsum(probabilities) - probabilities
    kept = jnp.where(before < top_p, jnp.log(probabilities), -jnp.inf)
    return order[jax.random.categorical(key, kept)].astype(jnp.int32)


def continue_text(sampler: Sampler, params: Params, tokenizer: Any, ask: config.Sample, room: int = 0) -> str:
    """The prompt and its continuation, up to the end of the document or max_tokens. `room`: see Sampler.tokens."""
    prompt = prompt_ids(tokenizer, ask.prompt, sampler.run.model.vocab_size)
    made: list[int] = []
    how = {"temperature": ask.temperature, "top_p": ask.top_p, "seed": ask.seed}
    for token in sampler.tokens(params, prompt, max_tokens=ask.max_tokens, room=room, **how):
        if token == tokenizer.eot:
            break
        made.append(token)
    return tokenizer.decode([*prompt[len(tokenizer.bos) :], *made])


def prompt_ids(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """As a document begins; a line's end where there is nothing at all to go on from.

    Raises TokenizerError for an id that the model does not have (the tokenizer is not that of its training), and where there
    is nothing to go on from at all.
    """
    ids = [*tokenizer.bos, *tokenizer.encode(prompt)] or tokenizer.encode("\n")
    if not ids:
        raise TokenizerError(f"tokenizer {tokenizer.name!r} makes no token of the prompt {prompt!r}: give another prompt")
    if max(ids) >= vocab_size:
        raise TokenizerError(
            f"tokenizer {tokenizer.name!r} gives the id {max(ids)} for the prompt {prompt!r}, and the model has "
            f"{vocab_size}. Name the tokenizer that it was trained with."
        )
    return ids


def continue_all(sampler: Sampler, params: Params, tokenizer: Any, ask: config.Sample) -> list[str]:
    """The same for each of the prompts that `ask.prompt` holds."""
    asks = [dataclasses.replace(ask, prompt=prompt) for prompt in prompts(ask.prompt)]
    vocab_size = sampler.run.model.vocab_size
    room = max(len(prompt_ids(tokenizer, one.prompt, vocab_size)) for one in asks) + ask.max_tokens
    return [continue_text(sampler, params, tokenizer, one, room) for one in asks]


def load(path: str, devices: Sequence[Any], base: str = "") -> tuple[RunConfig, Sampler, Params, int]:
    """Config, sampler, weights and step of a run's folder (its newest checkpoint), one checkpoint, or a Hugging Face folder.

    Of a run with adapters, weights are those of their base and the adapters. base: where the base is now, if not where it was.

    Raises CheckpointError, HuggingFaceError, or ConfigError where the stored config is not one of this version.
    """
    run, step = run_at(path)
    spread = alone(run, devices)
    sampler = Sampler(run, make_placement(spread, devices[: spread.mesh.fsdp]))
    return run, sampler, read_params(path, run, sampler.definition, sampler.placement, base), step
