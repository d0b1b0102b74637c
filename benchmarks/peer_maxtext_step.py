"""Compile MaxText's train step for GPUs of a topology. benchmarks/peer_maxtext.py runs this script in MaxText's environment.

    PYTHON benchmarks/peer_maxtext_step.py --out=FOLDER --description=TEXTPROTO --gpus=8 --options=JSON -- remat_policy=full ...

The script needs maxtext, jax with its CUDA plugin, and CUDA's assembler, but no GPU and no jaxtrain. MaxText's ahead-of-time
command (`maxtext.trainers.pre_train.train_compile`) runs with three changes. The GPUs are those of the topology in
--description. The version of cuDNN, which JAX's wrapper of cuDNN attention reads from the GPU, is a constant. The step is
compiled once for each set of options in --options. Each result is written as NAME.hlo, NAME.pb (XLA's HloProto with the buffer
assignment) and NAME.json. Arguments after `--` are keys of MaxText, as on its command line.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Set before jax is imported, because MaxText counts the devices of the host.
os.environ["JAX_PLATFORMS"] = "cpu"
# MaxText's switch to run without Google Cloud's packages.
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

CUDNN = 91900  # version of cuDNN for JAX's wrapper; no kernel runs
# With autotuning, XLA would compile every candidate of each fusion's kernel and choose the first: see jaxtrain/plan/compile.py.
NO_TUNING = {"xla_gpu_experimental_enable_fusion_autotuner": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is compiled")
    parser.add_argument("--description", type=Path, required=True, help="one GPU, as XLA's textproto")
    parser.add_argument("--capability", required=True, help="its compute capability, such as 9.0")
    parser.add_argument("--gpus", type=int, required=True, help="how many, in one node")
    parser.add_argument("--options", type=json.loads, required=True, help="NAME -> compiler options, as JSON")
    parser.add_argument("keys", nargs="*", help="MaxText's, as key=value")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.gpus}"
    args.out.mkdir(parents=True, exist_ok=True)
    _compile(args)


def _compile(args: argparse.Namespace) -> None:
    import jax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    for name in ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"):
        if not hasattr(cudnn, name):
            sys.exit(f"jax {jax.__version__} has no {name} in its cuDNN attention: this script knows jax 0.12.0")
    own = tuple(map(int, args.capability.split(".")))
    cudnn.check_cudnn_version = lambda: CUDNN
    cudnn.check_compute_capability = lambda least: own >= tuple(map(int, least.split(".")))
    cudnn.is_cuda_compute_capability_equal = lambda capability: capability == args.capability

    from maxtext.trainers.pre_train import train_compile  # pyright: ignore[reportMissingImports]

    described = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{args.gpus}", target_config=args.description.read_text()
    ).devices
    mesh_of, compile_once = train_compile.get_topology_mesh, jax.stages.Lowered.compile

    def described_mesh(config: Any) -> Any:
        present, jax.devices = jax.devices, lambda *_: described
        try:
            return mesh_of(config)
        finally:
            jax.devices = present

    calls = []

    def compile_each(lowered: Any, compiler_options: Any = None) -> Any:
        calls.append(lowered)
        made = [
            _write(str(args.out / name), lambda extra: compile_once(lowered, extra), options, args.keys)
            for name, options in args.options.items()
        ]
        return made[-1]

    train_compile.get_topology_mesh = described_mesh
    jax.stages.Lowered.compile = compile_each  # pyright: ignore[reportAttributeAccessIssue]
    base = Path(train_compile.__file__).parents[2] / "configs" / "base.yml"
    train_compile.main(["train_compile", str(base), *args.keys])
    if len(calls) != 1:
        sys.exit(f"MaxText compiled {len(calls)} programs, not one: this script knows maxtext 0.2.5")


def _write(at: str, compile_with: Any, options: dict[str, Any], keys: list[str]) -> Any:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_with(NO_TUNING | {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True} | options)
        (dumped,) = Path(folder).glob("*after_optimizations.hlo.pb")
        Path(f"{at}.pb").write_bytes(dumped.read_bytes())
    memory = compiled.memory_analysis()
    Path(f"{at}.hlo").write_text(compiled.as_text())
    facts = {
        "options": options,
        "keys": keys,
        "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "seconds": time.perf_counter() - began,
        "date": datetime.date.today().isoformat(),
        "versions": {p: importlib.metadata.version(p) for p in ("maxtext", "jax", "jaxlib", "jax-cuda12-plugin")},
    }
    Path(f"{at}.json").write_text(json.dumps(facts, indent=1))
    print(f"peer_maxtext: {Path(at).name}: {facts['peak'] / 2**30:.2f} GiB, compiled in {facts['seconds']:.0f} s", flush=True)
    return compiled


if __name__ == "__main__":
    main()
