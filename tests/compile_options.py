"""XLA options with which the test suite compiles its programs, in this process and in child processes."""

# LLVM's optimizations take half of the compile time, and programs of a few steps never earn it back. All of XLA's own passes
# still run, the partitioner among them.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# Variables for a process that has not yet imported JAX: 8 CPU devices, and programs that compile quickly.
EIGHT_CPUS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICKLY}"}
