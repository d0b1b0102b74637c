"""How fast batches come from a token file that the page cache holds: the code that training uses, on one thread."""

import tempfile
import time
from pathlib import Path

import numpy as np

from jaxtrain import config
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.pipeline import open_source
from jaxtrain.data.tokenfile import TokenWriter

TOKENS = 64_000_000
MEAN_DOCUMENT = 700  # tokens; lengths are log-normal, as those of web pages roughly are


def write_corpus(path: Path) -> None:
    """Random bytes in documents of log-normal length."""
    rng = np.random.default_rng(0)
    sigma = 1.0
    lengths = rng.lognormal(np.log(MEAN_DOCUMENT) - sigma**2 / 2, sigma, TOKENS // MEAN_DOCUMENT).astype(np.int64) + 1
    pool = rng.integers(0, 256, 1 << 22, dtype=np.uint16)
    with TokenWriter(path, tokenizers.info(tokenizers.ByteTokenizer()), sources=["random"]) as writer:
        for start, length in zip(rng.integers(0, len(pool) // 2, len(lengths)).tolist(), lengths.tolist(), strict=True):
            writer.write(pool[start : start + length], length)
            writer.end_document()


def bench(batch: int, seq_len: int, seconds: float) -> dict[str, float]:
    """Tokens per second of wall time and of CPU time, and the time to open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.tok")
        write_corpus(path)
        path.read_bytes()  # into the page cache
        data = config.Data(source=str(path), seq_len=seq_len)
        started = time.perf_counter()
        batches = open_source(data, data.source, split="train", global_batch=batch, data_dir=folder)
        opened = time.perf_counter()
        batches.batch(0)
        step, cpu, begin = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batches.batch(step)
            step += 1
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    tokens = step * batch * seq_len
    return {
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "batch_us": 1e6 * wall / step,
        "open_s": opened - started,
    }
