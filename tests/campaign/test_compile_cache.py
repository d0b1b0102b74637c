"""XLA:CPU loads programs for several devices wrongly from JAX's compile cache, which jaxtrain.startup leaves off for them.

If the second test fails, a newer jaxlib loads them rightly: let set_compile_cache keep them again.
"""

import os
import subprocess
import sys
from pathlib import Path

import helpers
import jax
import runs
from compile_options import QUICKLY

from jaxtrain import startup

# Weights are gathered before the step, each in a loop of its own.
ENTRY = "experts with room: data2xfsdp2xexpert2/train.grad_accum=2/sharding.gather=step"
CHILD = """
import sys
import jax
from jaxtrain.startup import threads_for_cpus
threads_for_cpus(8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
import matrix
comparison = matrix.against_one_device(sys.argv[2], "f32")
sys.exit(5 if comparison.wrong else 0)
"""


def test_the_cache_stays_off_with_several_cpu_devices(tmp_path: Path):
    assert jax.device_count() == 8
    startup.set_compile_cache(helpers.tiny({"paths.cache": str(tmp_path)}))
    assert jax.config.jax_compilation_cache_dir is None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loaded_program_corrupts_memory(tmp_path: Path):
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICKLY}"}
    environ["PYTHONPATH"] = os.pathsep.join([str(runs.REPO), str(runs.REPO / "tests")])
    command = [sys.executable, "-c", CHILD, str(tmp_path), ENTRY]

    def code() -> int:
        return subprocess.run(command, env=environ, capture_output=True, timeout=300).returncode

    assert code() == 0, "compiled in this process, the steps are those of one device"
    assert any(code() for _ in range(4)), "loaded from the cache, they no longer are"
