"""Log-probabilities of texts, and greedy continuations, for evaluation harnesses.

Log-probabilities are of the requested tokens only, from the model's logits in float32. Rows of a batch are padded on the right,
which a causal model ignores. Lengths are rounded up to powers of two, so few programs are compiled.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import schema
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.kernels.attention import Hardware, support
from jaxtrain.models.attention import Kernel
from jaxtrain.models.module import Params
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement, replicated
from jaxtrain.step.attention_specs import attention_specs
from jaxtrain.step.definition import for_inference, make_definition
from jaxtrain.train.generation import Sampler

SHORTEST = 64  # padded length of the shortest texts
CHUNKS = (4096, 512, 64, 8, 1)  # tokens that are prefilled at a time: few sizes, few programs
LOGITS = 2048  # tokens whose logits exist at one time; at least one token of each row


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probability of the last `count` of `tokens`, given the tokens before them."""

    tokens: Sequence[int]
    count: int


class Scorer:
    """Scores texts with a model, on the devices of `sampler`.

    rows: sequences in a batch, rounded up to a multiple of the number of devices that shard the batch. max_length: longest
    input in tokens; 0: data.seq_len, the sequence length of training.

    Raises ConfigError for a sampler on pipeline stages.
    """

    def __init__(self, run: RunConfig, sampler: Sampler, params: Params, *, rows: int = 8, max_length: int = 0):
        mesh = sampler.placement.mesh
        if sampler.placement.mesh_axes("layers"):
            stages = sampler.placement.size("stage")
            raise ConfigError([Problem("mesh.stage", stages, "a model is scored without pipeline stages", "Set mesh.stage=1.")])
        sharded_run = dataclasses.replace(for_inference(run), mesh=schema.Mesh(**dict(mesh.shape)))
        self.placement = make_placement(sharded_run, list(mesh.devices.flat))  # the sampler's own placement shards no batch
        shards = self.placement.size(self.placement.mesh_axes("batch"))
        self.rows = -(-rows // shards) * shards
        self.max_length = max_length or run.data.seq_len
        # Each row is one document, so rows are not packed, for any data.packing.
        specs = tuple(
            dataclasses.replace(spec, packed=False, max_segments=1)
            for spec in attention_specs(run.model, run.data, run.compute)
        )
        longest = padded_length(self.max_length)
        name, _ = support.choose_attention(
            "auto", [(spec, longest) for spec in specs], Hardware.from_device(mesh.devices.flat[0])
        )
        definition = make_definition(sharded_run, make_zero(sharded_run.sharding, self.placement), Kernel(name, specs))
        self._run, self._sampler, self._params = run, sampler, params
        self._unsharded = replicated(self.placement)
        specs, row_spec = definition.specs(self.placement), self.placement.spec(("batch", None))
        score = self.placement.shard_map(self._score_function(definition), (specs, row_spec, row_spec), (row_spec, row_spec))
        self._score = jax.jit(score, out_shardings=(self._unsharded, self._unsharded))
        self._extend = jax.jit(self._next_token, donate_argnums=1)

    def _score_function(self, definition: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
        def score(params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return (log-probability of each target, whether it is the likeliest token), both (B, T)."""
            B, T = tokens_BT.shape
            model = definition.bind(params)
            positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
            hidden_BTD = model(tokens_BT, jnp.ones_like(positions_BT), positions_BT)
            chunk = min(T, max(1, 1 << int(math.log2(max(1, LOGITS // B)))))

            def score_chunk(i: jax.Array) -> tuple[jax.Array, jax.Array]:
                at = i * chunk
                logits_BCV = model.logits(jax.lax.dynamic_slice_in_dim(hidden_BTD, at, chunk, axis=1))
                targets_BC = jax.lax.dynamic_slice_in_dim(targets_BT, at, chunk, axis=1)
                target_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
                log_prob_BC = target_BC - jax.nn.logsumexp(logits_BCV, axis=-1)
                return log_prob_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

            chunks = jax.lax.map(score_chunk, jnp.arange(T // chunk))  # (T / C, B, C)
            log_prob_BT, likeliest_BT = (jnp.moveaxis(x, 0, 1).reshape(B, T) for x in chunks)
            return log_prob_BT, likeliest_BT

        return score

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, bool]]:
        """Return for each request the sum of its log-probabilities (nats), and whether each of its tokens is the likeliest.

        Of a text longer than max_length, the first tokens are dropped. Raises ValueError if more than max_length tokens are to
        be scored.
        """
        for request in requests:
            if request.count > self.max_length:
                raise ValueError(f"{request.count} tokens are to be scored at once, above max_length = {self.max_length}")
        clipped = [ScoreRequest(request.tokens[-(self.max_length + 1) :], request.count) for request in requests]
        out: list[tuple[float, bool]] = [(0.0, True)] * len(clipped)
        # Texts of similar length are in one batch. The longest are first, so a batch that does not fit in memory fails at once.
        order = sorted((i for i, request in enumerate(clipped) if request.count), key=lambda i: -len(clipped[i].tokens))
        for start in range(0, len(order), self.rows):
            batch = order[start : start + self.rows]
            T = padded_length(len(clipped[batch[0]].tokens) - 1)
            rows_BT = np.zeros((self.rows, T + 1), np.int32)
            for row, i in enumerate(batch):
                rows_BT[row, : len(clipped[i].tokens)] = clipped[i].tokens
            sharding = self.placement.sharding(("batch", None), "tokens to score", (self.rows, T))
            tokens_BT, targets_BT = (jax.device_put(x, sharding) for x in (rows_BT[:, :-1], rows_BT[:, 1:]))
            log_prob_BT, likeliest_BT = (np.asarray(x) for x in self._score(self._params, tokens_BT, targets_BT))
            for row, i in enumerate(batch):
                end = len(clipped[i].tokens) - 1
                span = slice(end - clipped[i].count, end)
                out[i] = math.fsum(log_prob_BT[row, span].tolist()), bool(likeliest_BT[row, span].all())
        return out

    def windows(self, tokens: Sequence[int], first: int) -> Iterator[ScoreRequest]:
        """Yield a text of any length in requests that score at most max_length tokens each.

        Each token is scored once. The context of a request's first token is the one token before it. Only a last request that
        scores fewer tokens has more context before its first token. `first`: the token before the text.
        """
        after = [first, *tokens]
        for start in range(0, len(tokens), self.max_length):
            end = min(start + self.max_length, len(tokens))
            yield ScoreRequest(after[max(0, end - self.max_length) : end + 1], end - start)

    def _next_token(self, params: Params, cache: Any, tokens_BT: jax.Array) -> tuple[jax.Array, Any]:
        """Return the likeliest token after `tokens_BT`, (B,), and the cache with `tokens_BT` added."""
        logits_BV, cache = self._sampler.decode(params, cache, tokens_BT)
        return jnp.argmax(logits_BV, axis=-1), cache

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt. A prompt has at least one token.

        A continuation ends when `done(index of the prompt, tokens of the continuation)` is true, or after `max_tokens` tokens.
        Of a prompt longer than max_length - `max_tokens`, the first tokens are dropped. Raises ValueError if that length is
        below 1.
        """
        for most in max_tokens:
            if most >= self.max_length:
                raise ValueError(
                    f"max_gen_toks = {most} leaves no room for a prompt: the model sees max_length = {self.max_length} tokens"
                )
        clipped = [list(p[-(self.max_length - most) :]) for p, most in zip(prompts, max_tokens, strict=True)]
        continuations: list[list[int]] = [[] for _ in clipped]
        order = sorted((i for i in range(len(clipped)) if max_tokens[i] > 0), key=lambda i: -len(clipped[i]))
        for start in range(0, len(order), self.rows):
            batch = order[start : start + self.rows]
            self._generate(batch, clipped, continuations, max_tokens, done)
        return continuations

    def _generate(
        self,
        batch: list[int],
        prompts: list[list[int]],
        continuations: list[list[int]],
        max_tokens: Sequence[int],
        done: Callable[[int, list[int]], bool],
    ) -> None:
        """Generate for one batch, and append the tokens of each prompt to its list in `continuations`.

        Prompts are prefilled in chunks, up to the length of the shortest. Then each step appends a token to every row. A row
        with a longer prompt gets its next prompt token instead of a generated one. So all rows have the same length and no
        padding.
        """
        room = padded_length(max(len(prompts[i]) + max_tokens[i] for i in batch))
        cache = self._sampler.empty_cache(self.rows, room)
        rows = [prompts[i] for i in batch]
        rows += [rows[-1]] * (self.rows - len(batch))
        shortest, at = min(map(len, rows)), 0
        newest_B = np.zeros(self.rows, np.int32)
        for chunk in CHUNKS:
            while shortest - at >= chunk:
                tokens_BT = jnp.asarray([row[at : at + chunk] for row in rows], jnp.int32)
                token_B, cache = self._extend(self._params, cache, tokens_BT)
                at += chunk
                newest_B = np.asarray(token_B)
        open_rows = set(range(len(batch)))
        while True:
            following = []
            for row, prompt in enumerate(rows):
                token = prompt[at] if at < len(prompt) else int(newest_B[row])
                if at >= len(prompt) and row in open_rows:
                    i = batch[row]
                    continuations[i].append(token)
                    if len(continuations[i]) >= max_tokens[i] or done(i, continuations[i]):
                        open_rows.discard(row)
                following.append([token])
            if not open_rows:
                return
            token_B, cache = self._extend(self._params, cache, jnp.asarray(following, jnp.int32))
            at += 1
            newest_B = np.asarray(token_B)


def padded_length(length: int) -> int:
    """Return the least power of two that is at least `length`, and at least SHORTEST."""
    return max(SHORTEST, 1 << max(0, length - 1).bit_length())
