"""The recipe of a layer type from outside the package (recipes/linear_hybrid): arithmetic, layouts, counts and refusals.

campaign/test_linear_hybrid_runs.py trains, resumes and plans it in child processes.
"""

import dataclasses
import importlib
import math
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_contract as contract
from ledger import REPO

from jaxtrain import flops
from jaxtrain.config import ConfigError
from jaxtrain.generation import Sampler
from jaxtrain.parity import compare
from jaxtrain.sharding import LayoutError
from jaxtrain.train.step_log import measure_rates

sys.path.append(str(REPO / "recipes"))  # a user sets PYTHONPATH to this folder
recipe = importlib.import_module("linear_hybrid.gated_delta_net")

SMALL = {
    **contract.SIZES,
    "model.family": "linear_hybrid.gated_delta_net:small",
    "model.num_layers": 4,
    # The norm of an output divides by its length. At a document's first token the length is |q . k| |v|, which may be nearly 0:
    # with the usual 1e-5 the norm would multiply the rounding of q by up to 300.
    "model.norm_eps": 1e-2,
    "model.qk_norm": True,
    "train.global_batch": 8,
}
CHUNK, B, T, N, K, V = 16, 2, 90, 3, 8, 12
# Documents that fill a chunk, begin at its border, begin and end within one, and span several; then padding.
LENGTHS = [[16, 16, 3, 1, 40, 14], [1, 50, 5, 25, 4, 5]]
SEGMENTS = np.stack([np.repeat([1, 2, 3, 4, 5, 0], lengths) for lengths in LENGTHS]).astype(np.int32)
ROUNDOFF = 2.0**-24


def arguments(T: int = T) -> list[np.ndarray]:
    """Return q, k, v, log decay and beta, which float32 represents exactly. The norms of keys are a little below 1."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((B, T, N, width)) for width in (K, K, V))
    k /= 1.001 * np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.exp(2 * rng.standard_normal((B, T, N)) - 2)
    beta = 1 / (1 + np.exp(-2 * rng.standard_normal((B, T, N))))
    return [x.astype(np.float32).astype(np.float64) for x in (q, k, v, log_decay, beta)]


def by_definition(q, k, v, log_decay, beta, segments):
    """Return the outputs of the delta rule, by token in float64, and the Frobenius norm of the state before each token."""

    def one(before, token):
        q, k, v, log_decay, beta, starts = token
        state = jnp.where(starts[:, None, None, None], 0.0, before) * jnp.exp(log_decay)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("BNKV,BNK->BNV", state, k))
        state = state + k[..., None] * u[..., None, :]
        return state, (jnp.einsum("BNKV,BNK->BNV", state, q), jnp.sum(before**2, (-1, -2)))

    starts = np.diff(segments, axis=1, prepend=-1) != 0
    tokens = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, v, log_decay, beta, starts)]
    o, squares = jax.lax.scan(one, jnp.zeros((B, N, K, V)), tokens)[1]
    return jnp.moveaxis(o, 0, 1), jnp.moveaxis(squares, 0, 1) ** 0.5


def inverse_and_error(system, error):
    """Return the inverse of 1 + system as the recipe computes it, and its float32 error bound. `error`: the error bound of
    system.
    """
    size, block = len(system), 1
    row, column = np.indices(system.shape)
    x, dx = np.eye(size), np.zeros_like(system)
    while block < size:
        lower = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        c, dc = lower * system, lower * error
        p = x @ c
        dp = dx @ abs(c) + abs(x) @ (dc + size * ROUNDOFF * abs(c))
        dx = dx + dp @ abs(x) + abs(p) @ (dx + size * ROUNDOFF * abs(x))
        x, block = x - p @ x, 2 * block
        dx = dx + ROUNDOFF * abs(x)
    return x, dx


def bound(q, k, v, log_decay, beta, segments):
    """Return the error bound of outputs in float32, (B, T, N).

    The bound is to first order in the roundoff e. |x| is the length of a vector or the Frobenius norm of a matrix. A sum of C
    log decays has an error of (C + 1) e |sum|, and |sum| exp(sum) < 1/exp(1). So a decay's error is at most ((C + 1) / exp(1) +
    4) e. Sums of C or K products, and the factors of each, add up to c = (C + K + 4) e + 2 x (the error of a decay). A chunk
    begins with the state S. X is the inverse of 1 + A, and r = beta (|v| + |k| |S|). Then the errors are:

        A    c beta_i |k_i| |k_j|
        X    dX, as `inverse_and_error` computes it
        u    du = (dX + c |X|) r; u itself is no longer than |X| r
        S    c |S| + sum of |k_j| (du_j + c |u_j|), and the error of the S before: a token multiplies it by
             decay (1 - beta k k^T), which lengthens no vector
        o    |q| times the error of S, with the sum over the tokens up to its own
    """
    lengths = np.asarray(by_definition(q, k, v, log_decay, beta, segments)[1])
    ql, kl, vl = (np.linalg.norm(x, axis=-1) for x in (q, k, v))
    c = (CHUNK + K + 4) * ROUNDOFF + 2 * ((CHUNK + 1) / math.e + 4) * ROUNDOFF
    of = np.zeros((B, T, N))
    for b, n in np.ndindex(B, N):
        error = 0.0
        for first in range(0, T, CHUNK):
            at = np.s_[b, first : first + CHUNK]
            own, k_C, kl_C, beta_C = segments[at], k[at][:, n], kl[at][:, n], beta[at][:, n]
            carried = lengths[b, first, n] * (own == segments[b, first - 1]) if first else 0.0 * own
            sums = np.cumsum(log_decay[at][:, n])
            seen = np.tril(own[:, None] == own[None])
            decays = seen * np.exp(np.tril(sums[:, None] - sums[None]))
            system = np.tril(beta_C[:, None] * decays * (k_C @ k_C.T), -1)
            x, dx = inverse_and_error(system, np.tril(c * beta_C[:, None] * seen * np.outer(kl_C, kl_C), -1))
            right = beta_C * (vl[at][:, n] + kl_C * carried)
            du, u = (dx + c * abs(x)) @ right, abs(x) @ right
            state = (carried > 0) * error + c * carried + seen @ (kl_C * (du + c * u))
            of[at][:, n], error = ql[at][:, n] * state, state[-1]
    return of


# ---- The recurrence


def test_chunks_compute_the_definition():
    given = arguments()
    with jax.enable_x64(True):
        wanted = np.asarray(by_definition(*given, SEGMENTS)[0])
        allowed = bound(*given, SEGMENTS)
    got = recipe.delta_rule(*(jnp.asarray(x, jnp.float32) for x in given), jnp.asarray(SEGMENTS), CHUNK)
    assert got.dtype == jnp.float32
    apart = np.abs(np.asarray(got, np.float64) - wanted).max(-1)
    assert (apart <= allowed)[SEGMENTS > 0].all(), (apart / allowed).max()
    assert allowed.max() < 0.01 * np.abs(wanted).max(), "a bound that would notice an error"


@pytest.mark.parametrize("chunk", [1, 16, 128])
def test_gradients_are_those_of_the_definition(chunk):
    """In float64 the tolerance of 1e-12 is a thousand times the rounding: any error of the formulas is larger."""
    given = arguments()
    by = np.random.default_rng(4).standard_normal((B, T, N, V))
    with jax.enable_x64(True):

        def of(rule):
            return jax.grad(lambda *x: jnp.sum(rule(*x) * by), range(5))(*map(jnp.asarray, given))

        wanted = of(lambda *x: by_definition(*x, SEGMENTS)[0])
        got = of(lambda *x: recipe.delta_rule(*x, jnp.asarray(SEGMENTS), chunk))
        assert contract.far(got, wanted) < 1e-12


def test_state_and_convolution_stay_in_their_document():
    """Other values in one document change no bit of another document's outputs."""
    given = [jnp.asarray(x, jnp.float32) for x in arguments()]
    second = (SEGMENTS == 2)[..., None]
    changed = [jnp.where(second.reshape(B, T, *[1] * (x.ndim - 2)), 0.9 * x, x) for x in given]
    taps = jnp.asarray(np.random.default_rng(5).standard_normal((N, V, 4)), jnp.float32)
    for f in (
        lambda x: recipe.delta_rule(*x, jnp.asarray(SEGMENTS), CHUNK),
        lambda x: recipe.short_convolution(x[2], taps, jnp.asarray(SEGMENTS)),
    ):
        differs = np.asarray(f(given) != f(changed)).any((-1, -2))
        assert differs[SEGMENTS == 2].any() and not differs[SEGMENTS != 2].any()


def test_convolution_sees_the_tokens_before():
    """The convolution's last tap multiplies the token itself, and its first tap the token three positions before."""
    x, taps = 100 * jnp.arange(1.0, 7.0)[None, :, None, None], jnp.asarray([[[1000.0, 100.0, 10.0, 1.0]]])
    y = recipe.short_convolution(x, taps, jnp.asarray([[1, 1, 1, 1, 1, 2]]))[0, :, 0, 0]
    np.testing.assert_allclose(y / 100, [1, 12, 123, 1234, 2345, 6], rtol=1e-6)  # where silu is the identity


# ---- The model


@pytest.mark.parametrize(
    "mesh",
    helpers.few(
        [
            {"mesh.data": 2},
            {"mesh.fsdp": 4},
            {"mesh.fsdp": 2, "mesh.tensor": 2},
            {"mesh.tensor": 2, "mesh.seq": 2, "parallel.context": "ulysses"},
        ],
        {"mesh.fsdp": 2, "mesh.tensor": 2},
    ),
    ids=lambda mesh: " ".join(f"{key[5:]}={size}" for key, size in mesh.items() if key.startswith("mesh")),
)
def test_layouts_take_the_steps_of_one_device(mesh):
    """Loss, gradients and weights agree with one device's, within the parity tests' bounds for float32."""
    one, many = (helpers.train(helpers.tiny(SMALL | more), 2).taken for more in ({}, mesh))
    found = compare.compare(many, one, compare.bounds(one, None, 1, 1))
    assert not found.wrong, found.wrong


@pytest.mark.more
@pytest.mark.parametrize(
    "test",
    [
        contract.test_family_builds,
        contract.test_family_is_causal,
        contract.test_family_keeps_documents_apart,
        contract.test_family_gradients_live,
    ],
    ids=lambda test: test.__name__.removeprefix("test_family_"),
)
def test_contract(test):
    test(("model.family", SMALL["model.family"]), helpers.tiny(SMALL))


def test_counts_are_those_of_its_own_layers():
    """The program counts every parameter of the model. FLOPs follow from the family's own formula: 2 for each weight except
    embedding and norms, plus attention and the recurrent states.
    """
    made = helpers.program(helpers.tiny(SMALL))
    run, shapes = made.run, made.definition.abstract
    assert made.parameters == sum(a.size for a in jax.tree.leaves(shapes))
    weights = sum(
        a.size for name, a in contract.names_of(shapes) if name.rpartition(".")[2].startswith(("w", "gate", "up", "down"))
    )
    weights += shapes["head"].size
    found, seq_len, family = flops.training(run), run.data.seq_len, recipe.small
    assert flops.forward(run.model, seq_len) == family.flops(run.model, seq_len)
    states = 3 * 6 * family.value_heads * family.key_dim * family.value_dim
    softmax = 4 * run.model.num_heads * run.model.head_dim * seq_len
    assert found.full == pytest.approx(3 * (2 * weights + states + softmax))
    assert found.causal == pytest.approx(3 * (2 * weights + states + softmax / 2))
    assert flops.beyond(run) is None
    rates = measure_rates(dataclasses.replace(run, log=dataclasses.replace(run.log, peak_tflops=1.0)), console=None)
    for _ in range(4):
        rates.start_step()
    line = rates.line()
    assert line["hfu"] is None and line["mfu_full"] > line["mfu_causal"] > 0


def test_a_stack_is_as_long_as_its_array():
    """Four layers are one period, so there is no loop over layers. With twelve layers the loop makes two trips before the last
    period.
    """
    assert [helpers.program(helpers.tiny(SMALL | {"model.num_layers": n})).layer_trips for n in (4, 12)] == [0, 2]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model.num_layers": 6}, "model.num_layers = 6: is no multiple of 4.*Set 8"),
        ({"model.num_experts": 4}, "model.num_experts = 4: this model has no experts. Set 0"),
        ({"model.sliding_window": 8, "model.attention_pattern": "lg"}, "model.attention_pattern = 'lg'.*Set ''"),
        ({"mesh.seq": 2}, "parallel.context = 'ring'.*all tokens of a sequence.*Set parallel.context=ulysses"),
        (
            {"model.num_heads": 8, "model.num_kv_heads": 8, "mesh.tensor": 8},
            "mesh = .*4 key heads.*do not divide over 8 devices",
        ),
        ({"mesh.stage": 2, "model.num_layers": 8, "train.grad_accum": 2}, "mesh.stage = 2"),
        ({"lora.rank": 2, "lora.targets": "wz"}, "gives no adapter to wz"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_it_cannot_do_is_refused(more, words):
    with pytest.raises((ConfigError, LayoutError), match=words):
        helpers.program(helpers.tiny(SMALL | more))


def test_it_writes_no_samples():
    made = helpers.program(helpers.tiny(SMALL))
    with pytest.raises(ConfigError, match=r"sample.max_tokens = .*has no decode\(\).*Set 0"):
        Sampler(made.run, made.placement)
