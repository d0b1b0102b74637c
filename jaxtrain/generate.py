"""Text from a trained model, token by token; sample.py is its command.

The model is the one that was trained, with the same attention code and a key/value cache. Weights stay split over the
devices, the one sequence is on all of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import config, lora
from jaxtrain.checkpoint import locate
from jaxtrain.config import RunConfig
from jaxtrain.kernels import attention
from jaxtrain.kernels.dot import DTYPES
from jaxtrain.models.attention import Kernel
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.module import Params, names, part
from jaxtrain.models.transformer import empty_cache
from jaxtrain.sharding import Placement, make_placement, replicated
from jaxtrain.state import TrainState, abstract_tensors, from_tensors
from jaxtrain.step import attention_spec, hardware_of, make_definition

# Axes of activations, which hold one sequence here: too little to split.
WHOLE = ("batch", "sequence", "residual")


class Sampler:
    """A model ready to continue text. Compiles once per prompt length and once for the single-token step."""

    def __init__(self, run: RunConfig, placement: Placement):
        rules = tuple((axis, () if axis in WHOLE else onto) for axis, onto in placement.rules)
        self.placement = dataclasses.replace(placement, rules=rules)
        # The rows of a cache are one document each; queries are the newest tokens only, which flash kernels do not do.
        # No token sees farther back than tokens did in training: rotary angles beyond that were never learnt.
        window = min(run.model.sliding_window or run.data.seq_len, run.data.seq_len)
        spec = dataclasses.replace(attention_spec(run), packed=True, cached=True, window=window)
        name, _ = attention.choose("auto", spec, hardware_of(placement.mesh.devices.flat[0]), seq_len=1)
        self.definition = make_definition(run, self.placement, Kernel(name, spec))
        self.run = run
        self._dtype = DTYPES[run.compute]
        self._extend = jax.jit(self._step, static_argnums=(5, 6), donate_argnums=1)

    def _step(self, params, cache, tokens_BT, key, index, temperature: float, top_p: float):
        model = self.definition.bind(params)
        hidden, cache = model.decode(tokens_BT, cache)
        logits_V = model.logits(hidden[:, -1:])[0, 0]
        return choose(logits_V, jax.random.fold_in(key, index), temperature, top_p), cache

    def tokens(
        self, params: Params, prompt: Sequence[int], *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Iterator[int]:
        """Token ids that continue the prompt (at least one id), one by one; the caller decides where to stop."""
        # Lengths are rounded up so that prompts of similar length share one compiled step.
        room = -(-(len(prompt) + max_tokens) // 64) * 64
        cache = jax.device_put(empty_cache(self.run.model, self.placement, 1, room, self._dtype), replicated(self.placement))
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


def continue_text(sampler: Sampler, params: Params, tokenizer: Any, ask: config.Sample) -> str:
    """The prompt and its continuation, up to the end of the document or max_tokens."""
    prompt = ask.prompt or "\n"
    ids = tokenizer.encode(prompt)
    made: list[int] = []
    drawn = sampler.tokens(params, ids, max_tokens=ask.max_tokens, temperature=ask.temperature, top_p=ask.top_p, seed=ask.seed)
    for token in drawn:
        if token == tokenizer.eot:
            break
        made.append(token)
    return tokenizer.decode([*ids, *made])


def load(path: str, devices: Sequence[Any], base: str = "") -> tuple[RunConfig, Sampler, Params, int]:
    """Config, sampler, weights and step of a run's folder (its newest checkpoint) or of one checkpoint.

    Of a run with adapters, weights are those of their base and the adapters. base: where the base is now, if not where it was.

    Raises CheckpointError, or ConfigError where the stored config is not one of this version.
    """
    checkpoints, step = locate(path)
    run, problems = config.resolve(checkpoints.meta(step)["config"])
    if problems:
        raise config.ConfigError(problems)
    spread = dataclasses.replace(run, mesh=config.Mesh(data=1, fsdp=len(devices), tensor=1, seq=1))
    sampler = Sampler(run, make_placement(spread, devices))
    whole = replicated(sampler.placement)
    params = jax.tree_util.tree_map_with_path(
        lambda path, a, axes: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=sampler.placement.sharding(axes, jax.tree_util.keystr(path), a.shape)
        ),
        sampler.definition.abstract,
        sampler.definition.axes,
    )
    abstract = TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, ())
    wanted = abstract_tensors(abstract)
    if not run.lora.rank:
        return run, sampler, from_tensors(abstract, checkpoints.restore(step, wanted, subset=True)).params, step
    meta, adapters = checkpoints.meta(step), {name for name in wanted if is_adapter(name)}
    place = base or lora.base_path(meta)
    tensors = checkpoints.restore(step, {k: v for k, v in wanted.items() if k in adapters or k == "step"}, subset=True)
    tensors |= lora.restore_base(place, {k: v for k, v in wanted.items() if k not in tensors})
    params = from_tensors(abstract, tensors).params
    beside = part(params, jax.tree.map(lambda name: not is_adapter(name), names(params)))
    lora.check_same(meta, place, lora.digest(beside))
    return run, sampler, params, step
