"""Bugs of one line, planted one at a time: does the suite notice?

    python tests/campaign/planted_bugs.py              try all; prints one line each, and the share that was noticed
    python tests/campaign/planted_bugs.py clip digest  those whose names contain one of these words

Each is tried in a copy of the repository, by the tests that are named beside it. A mutation that no test notices is a hole:
write the test, not an excuse. To add one, append it to MUTATIONS: a name, the file, the text (which must occur once), what
stands in its place, and the tests that should notice.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
COPIED = ("jaxtrain", "tests", "configs", "docs", "pyproject.toml", "README.md")
LIMIT_S = 600


class Mutation(NamedTuple):
    """A line that is wrong."""

    name: str
    file: str
    text: str
    instead: str
    tests: str  # arguments of pytest, below tests/


MUTATIONS = (
    Mutation(
        "clip: gradients below the limit are scaled up to it",
        "jaxtrain/step.py",
        "jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))",
        "clip_norm / jnp.maximum(norm, 1e-30)",
        "test_optimizer.py -k clip",
    ),
    Mutation(
        "router bias: moves in a skipped step",
        "jaxtrain/step.py",
        "balance.moved(params, statistics, verdict == guard.TAKEN)",
        "balance.moved(params, statistics, verdict < 9)",
        "test_moe.py -k moves_the_bias",
    ),
    Mutation(
        "tiles: a window reaches one position less",
        "jaxtrain/kernels/attention/tiles.py",
        "spec.window - 1 if spec.window",
        "spec.window - 2 if spec.window",
        "test_attention_properties.py -k tiles_to_visit",
    ),
    Mutation(
        "experts: losses count once for each microbatch",
        "jaxtrain/gradients.py",
        'share = micro["weights"].sum() / total',
        "share = 1.0",
        "test_moe.py -k microbatches_share",
    ),
    Mutation(
        "experts: metrics count once for each microbatch",
        "jaxtrain/gradients.py",
        "(value, share * statistics)",
        "(value, statistics)",
        "test_moe.py -k microbatches_share",
    ),
    Mutation(
        "experts: factors of both losses swapped",
        "jaxtrain/balance.py",
        "self.experts.balance_loss * means[0] + self.experts.z_loss * means[1]",
        "self.experts.z_loss * means[0] + self.experts.balance_loss * means[1]",
        "test_moe.py -k by_hand",
    ),
    Mutation(
        "digest: blind to the order of elements",
        "jaxtrain/digests.py",
        "w * ((index * jnp.uint32(KNUTH)) | jnp.uint32(1))",
        "w * (jnp.uint32(KNUTH) | jnp.uint32(1))",
        "test_digests.py",
    ),
    Mutation(
        "guard: a spike counts from one step more",
        "jaxtrain/guard.py",
        "known >= LEAST",
        "known > LEAST",
        "test_guard.py",
    ),
    Mutation(
        "guard: the upper median",
        "jaxtrain/guard.py",
        "(known - 1) // 2",
        "known // 2",
        "test_guard.py",
    ),
    Mutation(
        "guard: a held step counts as one more in a row",
        "jaxtrain/guard.py",
        'jnp.where(held, guard["in_a_row"], jnp.where(took',
        'jnp.where(held & took, guard["in_a_row"], jnp.where(took',
        "test_guard.py",
    ),
    Mutation(
        "data: sources of a mixture share one order",
        "jaxtrain/data/pipeline.py",
        "np.random.SeedSequence([self.seed, source, epoch])",
        "np.random.SeedSequence([self.seed, 0, epoch])",
        "test_data_mix.py -k own_order",
    ),
    Mutation(
        "resume: microbatches are asked about only with both losses on",
        "jaxtrain/resume.py",
        'after["experts.balance_loss"] or after["experts.z_loss"]',
        'after["experts.balance_loss"] and after["experts.z_loss"]',
        "test_checkpoint.py -k microbatches",
    ),
    Mutation(
        "parity: a NaN hides behind a number",
        "jaxtrain/parity/compare.py",
        "return not math.isfinite(value), value / bound[name] if bound[name] else value",
        "return False, value / bound[name] if bound[name] else value",
        "test_parity_command.py -k no_number",
    ),
    Mutation(
        "embedding: what was kept back of a gradient is lost",
        "jaxtrain/kernels/embedding.py",
        "left = still(s.outer + s.kept, to)",
        "left = still(s.outer, to)",
        'test_parity.py -k "test_matrix and fsdp2xtensor2xseq2 and zero"',
    ),
    Mutation(
        "ZeRO 1 and 2: the router's weight is rounded",
        "jaxtrain/zero.py",
        "self._spread(w if exact else w.astype(self.numerics.compute), axes)",
        "self._spread(w.astype(self.numerics.compute), axes)",
        "test_moe.py -k float32_in_every",
    ),
    Mutation(
        "roofline: FP8's least time at the rate of bfloat16",
        "jaxtrain/plan/program/roofline.py",
        "(self.rates.fp8_tflops if done.fp8 else self.rates.gemm_tflops)",
        "self.rates.gemm_tflops",
        "test_roofline.py -k cublas_call",
    ),
    Mutation(
        "FLOPs: one expert on a device computes no spare rows",
        "jaxtrain/flops.py",
        "(e.buffer if alone else 1.0)",
        "1.0",
        "test_flops.py -k alone",
    ),
    Mutation(
        "mesh: nodes take turns",
        "jaxtrain/sharding.py",
        "key=lambda d: (node_of(d), d.process_index, d.id)",
        "key=lambda d: d.id",
        "test_topology.py -k laid_out",
    ),
)


def plant(mutation: Mutation, root: Path) -> str:
    """Write a mutation into a copy of the repository and return the file's text before.

    Raises ValueError where the text does not occur just once.
    """
    file = root / mutation.file
    before = file.read_text()
    if (count := before.count(mutation.text)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.text!r} occurs {count} times in {mutation.file}, and must occur once")
    file.write_text(before.replace(mutation.text, mutation.instead))
    return before


def noticed(mutation: Mutation, root: Path) -> bool:
    """Return whether the tests of a mutation fail while it is planted in the copy `root`.

    Raises RuntimeError where no test was run.
    """
    before = plant(mutation, root)
    try:
        words = shlex.split(mutation.tests)
        command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", f"tests/{words[0]}", *words[1:]]
        environ = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True
    finally:
        (root / mutation.file).write_text(before)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    """Try mutations and return the exit code: 0 where all were noticed."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = REPO / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, root / name)
        for mutation in chosen:
            began = time.monotonic()
            found.append(noticed(mutation, root))
            verdict = "noticed" if found[-1] else "SURVIVED"
            print(f"{verdict:8}  {time.monotonic() - began:5.0f} s  {mutation.name} ({mutation.tests})", flush=True)
    print(f"{sum(found)} of {len(found)} noticed")
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
