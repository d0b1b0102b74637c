"""Options with which the suite's programs are compiled, in this process and in its children."""

# Half of the time of compiling goes to LLVM's optimizations, and programs of a few steps never earn it back. XLA's own passes,
# the partitioner among them, are all there.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
