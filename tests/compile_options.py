"""XLA options with which the test suite compiles its programs, in this process and in child processes."""

# LLVM's optimizations take half of the compile time, and programs of a few steps never earn it back. XLA:CPU's newer code
# generator takes half of the rest: it makes a context of MLIR for each fusion. All of XLA's own passes still run, the
# partitioner among them. AVX has no fused multiply-add: where a program's fusions end does not change its results.
QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_max_isa=AVX"
)

# Variables for a process that has not yet imported JAX: 8 CPU devices, and programs that compile quickly.
EIGHT_CPUS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICKLY}"}
