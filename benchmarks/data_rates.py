"""Tokens per CPU second of making batches and token files, compared with grain, datasets and plain numpy.

    python -m benchmarks.data_rates
    python -m benchmarks.data_rates --other=FOLDER

Every row is measured `--repeats` times, each time in a new process; the table has the medians. With `--other`, another checkout
of jaxtrain is measured alternately with this one. CPU seconds are user plus system time of the process. Other load of the CPUs
changes them less than wall time. Batches have 8 sequences. Their file is in the page cache and has documents of log-normal
length, 700 tokens on average.

For comparison, grain and numpy read the same sequences in a random order. They make only inputs and targets, from a memory map,
without segments, positions or weights. The text is modules of the Python standard library as JSON lines. The tokenizer is a
byte-level BPE trained on this text. `prepare` uses one process. datasets (the extra `hf-datasets`) reads the same JSON lines
and maps the same tokenizer over them. The last two rows are a loop that parses, encodes and concatenates, and `prepare` with
the byte tokenizer.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

BATCH = 8
MEAN_DOCUMENT = 700  # mean tokens of a document
EPOCHS = 3  # epochs of a file that are read
SEQ_LENS = (4096, 8192)
VOCAB = {16: 257, 32: 100_000}  # bits of a token id -> size of the vocabulary


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m benchmarks.data_rates", description="Tokens per CPU second of data.")
    p.add_argument("--other", default="", metavar="FOLDER", help="another checkout, measured in turn with this one")
    p.add_argument("--tokens", type=float, default=32e6, metavar="N", help="tokens in each file (default 32e6)")
    p.add_argument("--text-mb", type=float, default=20, metavar="MB", help="text to prepare (default 20)")
    p.add_argument("--repeats", type=int, default=3, metavar="N", help="times to measure each row (default 3)")
    p.add_argument("--case", default="", help=argparse.SUPPRESS)
    p.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return p


def random_documents(vocab: int, tokens: int) -> Iterator[Any]:
    """Yield documents as arrays of random token ids, of log-normal length. tokens: approximate sum of their lengths."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, tokens // MEAN_DOCUMENT).astype(np.int64) + 1
    pool = rng.integers(0, vocab, 1 << 22).astype(np.uint32)
    for start, length in zip(rng.integers(0, len(pool) // 2, len(lengths)).tolist(), lengths.tolist(), strict=True):
        yield pool[start : start + length]


def time_steps(make: Callable[[int], Any], steps: range, seq_len: int) -> float:
    """Return tokens per CPU second of calling make(step) for all steps."""
    began = time.process_time()
    for step in steps:
        make(step)
    return len(steps) * BATCH * seq_len / (time.process_time() - began)


def time_batches(folder: Path, tokens: int, bits: int) -> dict[str, float]:
    """Return tokens per CPU second of training's batches, without the prefetch thread."""
    from jaxtrain.config import schema
    from jaxtrain.data import tokenizer
    from jaxtrain.data.batches import open_source
    from jaxtrain.data.tokenfile import TokenWriter

    path, found = folder / "a.tok", {}
    with TokenWriter(path, {**tokenizer.tokenizer_info(tokenizer.ByteTokenizer()), "vocab_size": VOCAB[bits]}) as writer:
        for ids in random_documents(VOCAB[bits], tokens):
            writer.write(ids, len(ids))
            writer.end_document()
    for seq_len, packing in product(SEQ_LENS, ("documents", "none")):
        data = schema.Data(source=str(path), seq_len=seq_len, packing=packing)
        batches = open_source(data, data.source, split="train", global_batch=BATCH, data_dir=folder)
        steps = batches.tokens_per_epoch // (BATCH * seq_len)
        rate = time_steps(batches.batch, range(EPOCHS * steps), seq_len)
        found[f"batches, uint{bits}, {seq_len} tokens, packing={packing}"] = rate
    return found


def write_ids(folder: Path, tokens: int, bits: int) -> Any:
    """Write the documents of `random_documents` as a plain array of ids. Return its memory map, shape [tokens]."""
    import numpy as np

    path, dtype = folder / "ids.bin", np.dtype(f"u{bits // 8}")
    with path.open("wb") as file:
        for ids in random_documents(VOCAB[bits], tokens):
            file.write(ids.astype(dtype).tobytes())
    return np.memmap(path, dtype, "r")


def time_numpy(folder: Path, tokens: int, bits: int) -> dict[str, float]:
    """Return tokens per CPU second of inputs and targets that numpy gathers from a memory map with one index array."""
    import numpy as np

    ids, found = write_ids(folder, tokens, bits), {}
    for seq_len in SEQ_LENS:
        steps = (len(ids) - 1) // seq_len // BATCH
        order = np.random.default_rng(0).permutation(steps * BATCH).reshape(steps, BATCH)
        windows = np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)[::seq_len]

        def make(step: int, windows: Any = windows, order: Any = order) -> tuple[Any, Any]:
            rows = windows[order[step % len(order)]]
            return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)

        found[f"numpy, uint{bits}, {seq_len} tokens"] = time_steps(make, range(EPOCHS * steps), seq_len)
    return found


def time_grain(folder: Path, tokens: int, bits: int) -> dict[str, float]:
    """Return tokens per CPU second of grain's source, shuffle and batch, without threads, since threads slow grain."""
    import grain
    import numpy as np

    ids, found = write_ids(folder, tokens, bits), {}

    class Windows:
        def __init__(self, seq_len: int):
            self.seq_len = seq_len

        def __len__(self) -> int:
            return (len(ids) - 1) // self.seq_len

        def __getitem__(self, index: Any) -> dict[str, Any]:
            row = ids[index * self.seq_len : (index + 1) * self.seq_len + 1].astype(np.int32)
            return {"tokens": row[:-1], "targets": row[1:]}

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    for seq_len in SEQ_LENS:
        source: Any = Windows(seq_len)
        dataset = grain.MapDataset.source(source).seed(0).shuffle().batch(BATCH, drop_remainder=True)
        following = iter(dataset.repeat(EPOCHS).to_iter_dataset(options)).__next__
        steps = range(len(dataset) * EPOCHS)
        found[f"grain, uint{bits}, {seq_len} tokens"] = time_steps(lambda _, make=following: make(), steps, seq_len)
    return found


def read_text(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def write_text(folder: Path, megabytes: float) -> None:
    """Write text.jsonl (modules of the standard library) and tokenizer.json (trained on that text)."""
    import tokenizers

    from jaxtrain.data.stdlib import list_files

    texts, size = [], 0
    for _, path in list_files():
        texts.append(path.read_bytes().decode(errors="replace"))
        size += len(texts[-1].encode())
        if size > megabytes * 1e6:
            break
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=32_000, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def time_prepare(folder: Path, text: Path, tokenizer: str) -> dict[str, float]:
    """Return tokens per CPU second of `prepare` with one process."""
    from jaxtrain.data.prepare import prepare_corpus

    began = time.process_time()
    (header,) = prepare_corpus([str(text / "text.jsonl")], folder / "out.tok", tokenizer=tokenizer, processes=1)
    name = "bytes" if tokenizer == "byte" else "BPE of 32,000"
    return {f"prepare, {name}": header["tokens"] / (time.process_time() - began)}


def time_datasets(folder: Path, text: Path) -> dict[str, float]:
    """Return tokens per CPU second of `load_dataset` and `map` of the library datasets, in one process."""
    os.environ.update({"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"})
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(str(text / "tokenizer.json"))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [e.ids for e in tokenizer.encode_batch(rows["text"], add_special_tokens=False)]}

    began = time.process_time()
    rows = datasets.load_dataset("json", data_files=str(text / "text.jsonl"), split="train")
    made = rows.map(encode, batched=True, remove_columns=["text"])
    took = time.process_time() - began
    return {"datasets: load_dataset, map": (sum(map(len, made["ids"])) + len(made)) / took}


def time_loop(folder: Path, text: Path) -> dict[str, float]:
    """Return tokens per CPU second of a minimal loop: parse, encode, concatenate, write."""
    import numpy as np
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(text / "tokenizer.json"))
    began = time.process_time()
    encoded = tokenizer.encode_batch_fast(read_text(text / "text.jsonl"), add_special_tokens=False)
    ids = np.concatenate([np.asarray([*e.ids, 0], np.uint16) for e in encoded])
    ids.tofile(folder / "ids.bin")
    return {"json, encode_batch, numpy": len(ids) / (time.process_time() - began)}


def measure(case: str, asked: argparse.Namespace) -> dict[str, float]:
    """Return row -> tokens per CPU second of a case, measured in this process. case: one of CASES."""
    name, *words = case.split()
    tokens, text = int(asked.tokens), Path(asked.folder)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if name in ("batches", "grain", "numpy"):
            of = {"batches": time_batches, "grain": time_grain, "numpy": time_numpy}[name]
            return of(folder, tokens, int(words[0]))
        if name == "prepare":
            return time_prepare(folder, text, str(text / words[0]) if words[0] != "byte" else "byte")
        return {"datasets.map": time_datasets, "loop": time_loop}[name](folder, text)


def run_case(case: str, asked: argparse.Namespace, checkout: Path, folder: Path) -> dict[str, float]:
    """Return `measure`'s result for a case, from a new process with the jaxtrain of `checkout`.

    Raises RuntimeError with the last line of the process's error output if the process fails.
    """
    command = [sys.executable, __file__, f"--case={case}", f"--folder={folder}", f"--tokens={asked.tokens}"]
    environ = {**os.environ, "PYTHONPATH": str(checkout), "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


CASES = (
    *(f"{name} {bits}" for bits in VOCAB for name in ("batches", "grain", "numpy")),
    "prepare tokenizer.json",
    "datasets.map",
    "loop",
    "prepare byte",
)


def main() -> int:
    """Print the table. Return 0, or 2 if the command is wrong."""
    asked = parser().parse_args()
    if asked.case:
        print(json.dumps(measure(asked.case, asked)))
        return 0
    here = Path(__file__).resolve().parents[1]
    checkouts = {"this checkout": here} | ({asked.other: Path(asked.other).resolve()} if asked.other else {})
    if wrong := [name for name, path in checkouts.items() if not (path / "jaxtrain" / "data").is_dir()]:
        print(f"--other = {wrong[0]}: is no checkout of jaxtrain. Fix: name a folder with jaxtrain/data.", file=sys.stderr)
        return 2
    if asked.repeats < 1:
        print(f"--repeats = {asked.repeats}: must be 1 or more. Fix: --repeats=3", file=sys.stderr)
        return 2
    has_datasets = True
    names = ["numpy", "grain", "tokenizers", "datasets"]
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            has_datasets = False
    found_versions = ", ".join([f"Python {platform.python_version()}", *versions])
    print(f"{found_versions}; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} CPUs")
    print(f"| million tokens per CPU second | {' | '.join(checkouts)} |\n|---|{'---:|' * len(checkouts)}")
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder), asked.text_mb)
        for case in CASES:
            if case == "datasets.map" and not has_datasets:
                print("| datasets: not installed, needs the extra `hf-datasets` |")
                continue
            found: dict[tuple[str, str], list[float]] = {}
            for _ in range(asked.repeats):
                for name, path in checkouts.items():
                    if path == here or case.startswith(("batches", "prepare")):
                        for of, rate in run_case(case, asked, path, Path(folder)).items():
                            found.setdefault((of, name), []).append(rate)
            for of in dict.fromkeys(of for of, _ in found):
                rates = [found.get((of, name)) for name in checkouts]
                shown = " | ".join(f"{statistics.median(rate) / 1e6:.3g}" if rate else "" for rate in rates)
                print(f"| {of} | {shown} |", flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
