"""Host memory and speed of an import: a synthetic checkpoint of Llama's shape, random and sharded, onto 8 CPU devices.

python -m benchmarks.import_memory --gigabytes=4 --folder=/tmp/import

Prints the import's own report, then one line of JSON. Peak memory is that of the process while it imports, the arrays on its
devices included, less what it held before; size is that of the safetensors files. --gigabytes=16.06 is Llama 3 8B in bfloat16.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

SHARD = 1 << 30


def shape_of(gigabytes: float) -> dict:
    """Return config.json of a model of Llama 3 8B's shape, narrower throughout, whose weights take so much in bfloat16."""
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
    """Write the checkpoint, a file at a time, so that it takes little memory."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxtrain.hf.folder import model_of
    from jaxtrain.hf.names import entries

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

    for name, shape in [(name, e.their_shape) for e in entries(model_of(described)).values() for name in e.theirs]:
        held[name] = rng.integers(0x3C00, 0x3E00, shape, np.uint16).view(ml_dtypes.bfloat16)
        if sum(x.nbytes for x in held.values()) > min(SHARD, gigabytes * 1e9 / 4):
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def memory(line: str) -> int:
    """Return bytes of this process from /proc: VmRSS, in memory now, or VmHWM, the most since `reset_peak`."""
    (value,) = [row.split()[1] for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{line}:")]
    return 1024 * int(value)


def reset_peak() -> None:
    """Let VmHWM start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks.import_memory", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint, about")
    p.add_argument("--folder", type=Path, required=True, help="a scratch folder with space for twice the checkpoint")
    return p


def main() -> None:
    """Write a checkpoint, import it, and print its memory and time."""
    # Before jax is imported; not at import, which the tests of the docs do.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    args = parser().parse_args()
    theirs, ours = args.folder / "theirs", args.folder / "ours"
    for folder in (theirs, ours):
        shutil.rmtree(folder, ignore_errors=True)
    made = os.fork()  # so that writing it takes no memory of this process
    if not made:
        write(theirs, args.gigabytes)
        os._exit(0)
    if os.waitpid(made, 0)[1]:
        raise SystemExit("the synthetic checkpoint could not be written")

    import jax

    from jaxtrain.checkpoint.arrays import orbax
    from jaxtrain.hf.folder import open_folder
    from jaxtrain.hf.importing import import_folder

    jax.block_until_ready(jax.device_put(0.0))
    orbax()
    folder = open_folder(theirs)
    before, started = memory("VmRSS"), time.perf_counter()
    reset_peak()
    import_folder(folder, ours, "auto", print)
    report = {
        "devices": jax.local_device_count(),
        "size_gb": folder.bytes / 1e9,
        "peak_over_size": (memory("VmHWM") - before) / folder.bytes,
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(report))
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
