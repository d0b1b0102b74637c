"""One contract for every attention kernel that runs here, the table of who can do what, and cuDNN's side without a GPU."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import IMPLEMENTATIONS, Hardware, Rows, Spec, choose, cudnn, implementation

CPU, A100, H100, T4 = Hardware("cpu"), Hardware("gpu", (8, 0)), Hardware("gpu", (9, 0)), Hardware("gpu", (7, 5))
SPEC = Spec(head_dim=8, dtype="f32", packed=True, max_segments=6)
BF16 = Spec(head_dim=128, dtype="bf16", packed=True, max_segments=32)
HERE = [name for name in IMPLEMENTATIONS if not implementation(name).unsupported(SPEC, CPU)]
PRIVATE = (
    "jax changed the private cuDNN module that jaxtrain/kernels/attention/cudnn.py binds: compare it with "
    "jax/_src/cudnn/fused_attention_stablehlo.py of this jax before training on a GPU"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one comparison."""

    T: int
    N: int
    K: int
    spec: Spec
    padding: int = 0  # tokens at the end of each row but the first


def spec(**changes) -> Spec:
    return dataclasses.replace(SPEC, **changes)


CASES = {
    "multi-head": Case(24, 4, 4, spec()),
    "grouped 2": Case(24, 4, 2, spec(), padding=5),
    "grouped 4": Case(37, 8, 2, spec(), padding=1),
    "one key head": Case(19, 4, 1, spec()),
    "one document": Case(33, 4, 2, spec(packed=False, max_segments=1)),
    "window": Case(40, 4, 2, spec(window=7), padding=9),
    "window 1": Case(17, 2, 2, spec(window=1)),
    "softcap": Case(33, 4, 1, spec(softcap=2.0), padding=3),
    "all": Case(50, 8, 4, spec(window=11, softcap=1.5, head_dim=16), padding=17),
    "shorter than a block": Case(5, 2, 1, spec(), padding=2),
}


def make_rows(case: Case, batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions, (B, T): random documents, then padding."""
    segments, positions = np.ones((batch, case.T), np.int32), np.tile(np.arange(case.T, dtype=np.int32), (batch, 1))
    if not case.spec.packed:
        return segments, positions
    for b in range(batch):
        real = case.T - (case.padding if b else 0)
        documents = int(rng.integers(1, min(case.spec.max_segments, real) + 1))
        cuts = np.sort(rng.choice(np.arange(1, real), documents - 1, replace=False)) if documents > 1 else np.array([], int)
        start = np.concatenate([[0], cuts])
        number = np.searchsorted(cuts, np.arange(case.T), side="right")
        segments[b], positions[b] = number + 1, np.arange(case.T) - start[number]
        segments[b, real:] = positions[b, real:] = 0
    return segments, positions


def oracle(q, k, v, segments, positions, spec: Spec) -> np.ndarray:
    """Attention token by token, in float64 numpy."""
    B, T, N, H = q.shape
    group = N // k.shape[2]
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        if not segments[b, t]:
            continue
        seen = [
            s
            for s in range(T)
            if segments[b, s] == segments[b, t] and 0 <= positions[b, t] - positions[b, s] < (spec.window or T)
        ]
        scores = np.array([q[b, t, n].astype(float) @ k[b, s, n // group] for s in seen]) / np.sqrt(H)
        if spec.softcap:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ np.array([v[b, s, n // group] for s in seen])
    return out


@functools.cache
def data(name: str):
    """Inputs, rows and a cotangent of a case; no two cases share numbers."""
    case = CASES[name]
    rng = np.random.default_rng(list(CASES).index(name))
    shapes = [(3, case.T, heads, case.spec.head_dim) for heads in (case.N, case.K, case.K, case.N)]
    q, k, v, do = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return (q, k, v), make_rows(case, 3, rng), do


def small_blocks(name: str, monkeypatch: pytest.MonkeyPatch):
    """The kernel's module; one that works in blocks gets blocks that these short rows do not fill evenly."""
    module = implementation(name)
    if hasattr(module, "BLOCK"):
        monkeypatch.setattr(module, "BLOCK", 16)
    return module


def run(module, name: str):
    """(output, gradients of q, k, v) of a kernel on a case."""
    case = CASES[name]
    qkv, (segments, positions), do = data(name)

    @jax.jit
    def both(q, k, v, rows, do):
        prepared = module.prepare(rows, case.spec)
        out, back = jax.vjp(lambda q, k, v: module.attention(q, k, v, prepared, case.spec), q, k, v)
        return out, back(do)

    out, grads = both(*qkv, Rows(segments, positions, segments, positions), do)
    return np.asarray(out), [np.asarray(g) for g in grads]


def test_some_kernels_run_here():
    assert {"reference", "chunked"} <= set(HERE)


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("case", CASES)
def test_forward_matches_the_definition(case, kernel, monkeypatch):
    qkv, rows, _ = data(case)
    out, _ = run(small_blocks(kernel, monkeypatch), case)
    np.testing.assert_allclose(out, oracle(*qkv, *rows, CASES[case].spec), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", [name for name in HERE if name != "reference"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_the_reference(case, kernel, monkeypatch):
    _, ours = run(small_blocks(kernel, monkeypatch), case)
    _, theirs = run(implementation("reference"), case)
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["grouped 2", "window", "softcap"])
def test_reference_gradients_match_finite_differences(case):
    """The others are checked against the reference; the reference against the float64 definition."""
    qkv, rows, do = data(case)
    _, grads = run(implementation("reference"), case)
    rng = np.random.default_rng(7)
    for i, grad in enumerate(grads):
        direction, step = rng.standard_normal(grad.shape), 1e-4

        def at(sign, i=i, direction=direction, step=step):
            moved = [x.astype(float) + (sign * step * direction if i == j else 0) for j, x in enumerate(qkv)]
            return (oracle(*moved, *rows, CASES[case].spec) * do).sum()

        np.testing.assert_allclose((grad * direction).sum(), (at(1) - at(-1)) / (2 * step), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("case", [name for name, c in CASES.items() if c.padding])
def test_padding_gives_zero_and_finite_gradients(case, kernel, monkeypatch):
    module = small_blocks(kernel, monkeypatch)
    _, (segments, _), _ = data(case)
    out, grads = run(module, case)
    assert (segments == 0).any()
    assert not out[segments == 0].any()
    for grad in grads:
        assert np.isfinite(grad).all()
        assert not grad[segments == 0].any()


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("window", [0, 4])
def test_only_earlier_tokens_of_the_own_document_count(kernel, window, monkeypatch):
    """d out[t] / d (q, k, v)[s] is exactly 0 unless s is visible from t, and not 0 where it is."""
    module, T = small_blocks(kernel, monkeypatch), 21
    s = spec(window=window)
    segments = np.array([1] * 9 + [2] * 8 + [0] * 4, np.int32)[None]
    positions = np.concatenate([np.arange(9), np.arange(8), np.zeros(4)]).astype(np.int32)[None]
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, T, 2, 8)), jnp.float32) for _ in range(3))
    prepared = module.prepare(Rows(*map(jnp.asarray, (segments, positions, segments, positions))), s)
    output = lambda k, v: module.attention(q, k, v, prepared, s)[0].sum((-1, -2))  # noqa: E731
    jacobian = jax.jit(jax.jacrev(output, argnums=(0, 1)))(k, v)
    influence = np.stack([np.abs(np.asarray(j)).sum((1, 3, 4)) for j in jacobian])  # (2, T, S)
    t, u = np.mgrid[:T, :T]
    visible = (segments[0][t] == segments[0][u]) & (segments[0][t] > 0) & (u <= t) & (t - u < (window or T))
    assert (influence[:, ~visible] == 0).all()
    assert (influence[1][visible] > 0).all()


# ---- Who can do what


@pytest.mark.parametrize(
    ("name", "asked", "hardware", "reason"),
    [
        ("cudnn", BF16, CPU, "needs an NVIDIA GPU"),
        ("cudnn", BF16, T4, "8.0"),
        ("cudnn", BF16, A100, "packed documents"),
        ("cudnn", dataclasses.replace(BF16, dtype="f32"), H100, "bf16, not f32"),
        ("cudnn", dataclasses.replace(BF16, head_dim=100), H100, "multiple of 8"),
        ("cudnn", dataclasses.replace(BF16, head_dim=512), H100, "at most 256"),
        ("cudnn", dataclasses.replace(BF16, softcap=1.0), H100, "soft cap"),
        ("cudnn", dataclasses.replace(BF16, cached=True), H100, "cache"),
    ],
)
def test_a_kernel_that_cannot_is_refused_by_name(name, asked, hardware, reason):
    with pytest.raises(ValueError, match=reason) as error:
        choose(name, asked, hardware, 4096)
    assert f"attention.impl = '{name}'" in str(error.value)
    assert "attention.impl=auto" in str(error.value)


def test_unknown_kernel():
    with pytest.raises(ValueError, match="no such kernel.*reference"):
        choose("flash", BF16, H100, 4096)


@pytest.mark.parametrize(
    ("asked", "hardware", "seq_len", "taken", "because"),
    [
        (SPEC, CPU, 256, "reference", "GPU"),
        (SPEC, CPU, 8192, "chunked", "8192 x 8192"),
        (BF16, H100, 8192, "cudnn", ""),
        (BF16, A100, 8192, "chunked", "Hopper"),
        (dataclasses.replace(BF16, packed=False), A100, 8192, "cudnn", ""),
        (dataclasses.replace(BF16, softcap=30.0), H100, 8192, "chunked", "soft cap"),
        (dataclasses.replace(BF16, dtype="f32"), H100, 8192, "chunked", "bf16"),
        (BF16, T4, 4096, "chunked", "8.0"),
        (dataclasses.replace(BF16, cached=True), H100, 1, "reference", "cache"),
    ],
)
def test_auto_takes_the_first_that_can_and_says_why(asked, hardware, seq_len, taken, because):
    name, why = choose("auto", asked, hardware, seq_len)
    assert name == taken
    assert because in why


# ---- cuDNN, as far as it goes without a GPU


def packed(segments: list[list[int]], max_segments: int) -> tuple[list, list]:
    rows = jnp.asarray(segments, jnp.int32)
    made = cudnn.prepare(Rows(rows, rows, rows, rows), dataclasses.replace(BF16, max_segments=max_segments))
    assert made is not None
    return made.lengths_BM.tolist(), made.offsets_BM.tolist()


def test_cudnn_rows_of_documents():
    """One entry for each document that there may be, and one for padding."""
    lengths, offsets = packed([[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 1, 1], [1, 2, 2, 0, 0, 0]], 4)
    assert lengths == [[3, 2, 1, -1, -1], [6, -1, -1, -1, -1], [1, 2, -1, -1, 3]]
    assert offsets == [[0, 3, 5, -1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, -1, -1, 3, -1]]


def test_cudnn_row_with_as_many_documents_as_there_may_be():
    lengths, offsets = packed([[1, 2, 3, 3]], 3)
    assert lengths == [[1, 1, 2, -1]]
    assert offsets == [[0, 1, 2, -1, -1]]


def test_cudnn_room_for_one_document_is_room_for_padding_too():
    """The primitive takes rows for packed from two on."""
    lengths, offsets = packed([[1, 1, 1, 0]], 1)
    assert lengths == [[3, 1]]
    assert offsets == [[0, 3, -1]]


def test_cudnn_unpacked_needs_nothing():
    rows = jnp.ones((1, 4), jnp.int32)
    assert cudnn.prepare(Rows(rows, rows, rows, rows), dataclasses.replace(BF16, packed=False)) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_private_cudnn_primitives_have_the_parameters_we_bind(direction):
    primitive = getattr(cudnn.fused, f"_dot_product_attention_{direction}_p_wrapper", None)
    abstract = getattr(cudnn.fused, f"_dot_product_attention_{direction}_abstract", None)
    assert primitive is not None, PRIVATE
    assert abstract is not None, PRIVATE
    parameters = inspect.signature(abstract).parameters.values()
    q = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    bound = set(cudnn._static(q, BF16)) | ({"is_training"} if direction == "fwd" else set())
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == bound, PRIVATE
    operands = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [
        "query",
        "key",
        "value",
        "bias",
        "q_seqlen",
        "kv_seqlen",
        "q_offsets",
        "kv_offsets",
        "page_table_k",
        "page_table_v",
    ]
    expected += [] if direction == "fwd" else ["activation", "fwd_output", "grad_output"]
    assert operands == expected, PRIVATE


@pytest.mark.parametrize("asked", [BF16, dataclasses.replace(BF16, packed=False), dataclasses.replace(BF16, window=64)])
def test_private_cudnn_primitives_lower_for_a_gpu(asked):
    """Forward and backward inside a manual shard_map, as models/attention.py runs them, down to cuDNN's custom calls."""
    mesh = jax.make_mesh((8,), ("data",))
    B, T, N, K, H = 8, 256, 4, 2, 128
    split = jax.sharding.NamedSharding(mesh, P("data"))
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=split) for heads in (N, K))
    segments = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=split)

    def local(q, k, v, segments):
        prepared = cudnn.prepare(Rows(segments, segments, segments, segments), asked)
        out, back = jax.vjp(lambda *qkv: cudnn.attention(*qkv, prepared, asked), q, k, v)
        return out, *back(out)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    try:
        shapes = [a.shape for a in jax.eval_shape(f, q, k, k, segments)]
        text = f.trace(q, k, k, segments).lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:  # whatever jax raises, the reader needs this sentence first
        raise AssertionError(f"{PRIVATE}: {error}") from error
    assert shapes == [q.shape, q.shape, k.shape, k.shape], PRIVATE
    for call in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert call in text, PRIVATE
    assert ("PADDING_CAUSAL" in text) == asked.packed, PRIVATE
    # A partitioning callback would put an address into the program, and the compile cache would never find it again.
    assert "CustomSPMDPartitioning" not in text, PRIVATE


def test_table_names_importable_modules():
    for name in IMPLEMENTATIONS:
        module = implementation(name)
        assert all(callable(getattr(module, f)) for f in ("unsupported", "prepare", "attention")), name
    assert attention.IMPLEMENTATIONS is IMPLEMENTATIONS
