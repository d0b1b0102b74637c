"""Host memory and speed of an import and an export: a random, sharded checkpoint of Llama's shape, onto 8 CPU devices.

python -m benchmarks.import_memory --gigabytes=4 --folder=/tmp/import

The output is the reports of import and export, then one line of JSON. Each of the two commands runs in a separate process. Peak
memory is the process's maximum during the command, with the arrays on its devices, minus its memory before the command. Size is
that of the safetensors files. A plain copy of these files is timed too. Files are dropped from the page cache before they are
read.
--gigabytes=16.06 is Llama 3 8B in bfloat16. --dtype=nf4 stores its matrices in fewer bits, and an export decodes them.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD = 1 << 30


def shape_of(gigabytes: float) -> dict:
    """Return config.json of a Llama with Llama 3 8B's number of layers, and widths for this size of bfloat16 weights."""
    scale = (gigabytes / 16.06) ** 0.5
    width, wide, vocab = (max(256, round(size * scale / 256) * 256) for size in (4096, 14336, 128256))
    layers = 32
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 500000.0,
    }


def write(folder: Path, gigabytes: float) -> None:
    """Write a random checkpoint of about this size. Only one of its files is in memory at a time."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxtrain.hf.folder import model_of
    from jaxtrain.hf.names import model_entries

    folder.mkdir(parents=True)
    described = shape_of(gigabytes)
    (folder / "config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(0)
    where: dict[str, str] = {}
    held: dict[str, np.ndarray] = {}

    def flush() -> None:
        name = f"model-{len(set(where.values())):05d}.safetensors"
        save_file(held, folder / name)
        where.update(dict.fromkeys(held, name))
        held.clear()

    for name, shape in [(name, e.hf_shape) for e in model_entries(model_of(described)).values() for name in e.hf_names]:
        held[name] = rng.integers(0x3C00, 0x3E00, shape, np.uint16).view(ml_dtypes.bfloat16)
        if sum(x.nbytes for x in held.values()) > min(SHARD, gigabytes * 1e9 / 4):
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def memory(line: str) -> int:
    """Return the memory of this process in bytes. line: "VmRSS", now, or "VmHWM", the peak since `reset_peak`."""
    (value,) = [row.split()[1] for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{line}:")]
    return 1024 * int(value)


def reset_peak() -> None:
    """Reset VmHWM, the peak memory of this process, to its current memory."""
    Path("/proc/self/clear_refs").write_text("5")


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(size: int, seconds: float) -> dict[str, float]:
    """Return the rounded seconds and GB/s of `size` bytes."""
    return {"seconds": round(seconds, 2), "gb_per_s": round(size / 1e9 / seconds, 3)}


def measure(kind: str, source: Path, out: Path, size: int, shard_size: str, dtype: str, found: Any) -> None:
    """Run a command in this process, and put (number of devices, report) into the queue `found`.

    The report has seconds, GB/s, CPU seconds, and peak memory as a multiple of `size`. kind: "import" or "export".
    """
    import jax

    from jaxtrain.checkpoint.arrays import import_orbax

    jax.block_until_ready(jax.device_put(0.0))
    import_orbax()
    command = prepared(kind, source, out, shard_size, dtype)
    before, started, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    reset_peak()
    command()
    seconds, peak = time.perf_counter() - started, (memory("VmHWM") - before) / size
    report = {"peak_over_size": round(peak, 3), "cpu_seconds": round(time.process_time() - cpu, 2), **timed(size, seconds)}
    found.put((jax.local_device_count(), report))


def prepared(kind: str, source: Path, out: Path, shard_size: str, dtype: str) -> Callable[[], None]:
    """Import the modules of the command (import or export), and return a function that runs it."""
    if kind == "import":
        from jaxtrain.hf.folder import open_folder
        from jaxtrain.hf.importing import import_folder
        from jaxtrain.hf.in_bits import InBits

        folder = open_folder(source)
        return lambda: import_folder(folder, out, "auto", print, None if dtype == "auto" else InBits(folder, dtype))
    from jaxtrain.hf.exporting import export_model

    return lambda: export_model(str(source), out, shard_size=shard_size)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks.import_memory", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint, about")
    p.add_argument("--folder", type=Path, required=True, help="a scratch folder with space for twice the checkpoint")
    p.add_argument("--dtype", default="auto", choices=("auto", "fp8", "nf4"), help="of the import's matrices (auto)")
    p.add_argument("--shard-size", default="5GB", help="of a file of the export, at most (5GB)")
    return p


def main() -> None:
    """Write a checkpoint, copy it, import it, export it, and print memory and time."""
    # Set before jax is imported, but not when this module is imported, as the tests of the docs do.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    args = parser().parse_args()
    theirs, ours, back = (args.folder / name for name in ("theirs", "ours", "back"))
    for folder in (theirs, ours, back):
        shutil.rmtree(folder, ignore_errors=True)
    processes = multiprocessing.get_context("spawn")
    found = processes.Queue()

    def alone(call: Callable[..., None], *given: Any) -> None:
        process = processes.Process(target=call, args=given)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{call.__name__} failed with exit code {process.exitcode}")

    alone(write, theirs, args.gigabytes)
    size = sum(file.stat().st_size for file in theirs.glob("*.safetensors"))
    report: dict[str, Any] = {"size_gb": round(size / 1e9, 3)}
    forget(theirs)
    started = time.perf_counter()
    shutil.copytree(theirs, back)
    report["copy"] = timed(size, time.perf_counter() - started)
    shutil.rmtree(back)
    for kind, source, out in (("import", theirs, ours), ("export", ours, back)):
        forget(source)
        alone(measure, kind, source, out, size, args.shard_size, args.dtype, found)
        report["devices"], report[kind] = found.get()
        shutil.rmtree(source)
    print(json.dumps(report))
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
