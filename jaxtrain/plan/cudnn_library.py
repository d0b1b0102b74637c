"""Load cuDNN on a machine without a GPU, so that XLA gets the workspace of attention from cuDNN.

With the compiler option COMPILE, XLA builds the graphs of the attention kernels and writes their workspace into the program.
Compilation fails if cuDNN has no kernel for a graph. The extra `plan-cudnn` installs the libraries. They link to the CUDA
driver and the CUDA runtime, but launch nothing. Two stubs, built with this machine's C compiler, replace driver and runtime.
"""

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILE: dict[str, str | bool] = {"xla_gpu_cudnn_deviceless_compilation_mode": "CUDNN_DEVICELESS_COMPILATION_ALWAYS"}
# (package, library in it), in the order in which the libraries are loaded. cuDNN itself needs cuBLAS and NVRTC.
LIBRARIES = (
    ("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
    ("nvidia-cublas-cu12", "nvidia/cublas/lib/libcublasLt.so.12"),
    ("nvidia-cublas-cu12", "nvidia/cublas/lib/libcublas.so.12"),
    ("nvidia-cudnn-cu12", "nvidia/cudnn/lib/libcudnn.so.9"),
)
# The version that jax 0.12 requires without a GPU. 9.28 fails: it needs a library that its package does not have.
VERSION = "9.23.2.1"
REMEDY = "JAXTRAIN_CUDNN=1 ./run.sh setup installs it"

# Every driver function that cuDNN looks up before it builds a graph. cuDNN calls only those with a body in _DRIVER_SOURCE.
_DRIVER = """
cuCtxGetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet cuDeviceGetAttribute
cuDevicePrimaryCtxRelease cuDevicePrimaryCtxReset cuDevicePrimaryCtxRetain cuFuncGetAttribute cuFuncSetAttribute cuInit
cuKernelGetAttribute cuKernelSetAttribute cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuLibraryGetKernel
cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete
cuLinkCreate cuLinkCreate_v2 cuLinkDestroy cuMemcpyDtoH_v2 cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleLoadData
cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload cuOccupancyMaxActiveBlocksPerMultiprocessor
cuOccupancyMaxPotentialClusterSize cuStreamGetCtx cuStreamSynchronize cuTensorMapEncodeTiled
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_DRIVER_SOURCE = f"""
int cuDriverGetVersion(int *version) {{ *version = 13000; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = 0; return {_NO_DEVICE}; }}
int cuGetErrorName(int error, const char **text) {{ *text = "no device"; return 0; }}
int cuGetErrorString(int error, const char **text) {{ *text = "no device"; return 0; }}
""" + "\n".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in _DRIVER.split())
# cuDNN's front end reads the compute capability of device 0: `major` at byte 360 and `minor` at 364 of cudaDeviceProp, which
# begins with name[256], uuid, luid and five sizes, as in CUDA 12's headers.
_RUNTIME_SOURCE = """
#include <string.h>
int jaxtrain_capability[2] = {9, 0};
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceProperties_v2(char *to, int device) {
  memset(to, 0, 400);
  memcpy(to + 360, jaxtrain_capability, 8);
  return 0;
}
int cudaGetDeviceProperties(char *to, int device) { return cudaGetDeviceProperties_v2(to, device); }
"""


class LibraryError(RuntimeError):
    """cuDNN cannot be loaded. The message has the reason and a fix."""


class CudnnLibrary:
    """cuDNN, loaded into this process. `name` is its name in reports, such as "cudnn 9.23.2"."""

    def __init__(self, runtime: ctypes.CDLL):
        self.name = f"cudnn {VERSION.rpartition('.')[0]}"
        self._capability = (ctypes.c_int * 2).in_dll(runtime, "jaxtrain_capability")

    def options(self, sm: int) -> dict[str, str | bool]:
        """Set the compute capability times ten that the stub reports to cuDNN, and return the options for XLA to call cuDNN."""
        self._capability[:] = divmod(sm, 10)
        return COMPILE


def load_cudnn() -> CudnnLibrary:
    """Load cuDNN. Call this function before JAX is imported, in a process that uses no GPU.

    Raises LibraryError if JAX is imported already, a package or a C compiler is missing, cuDNN is not VERSION, or a library
    cannot be loaded.
    """
    if "jax" in sys.modules:
        raise LibraryError("JAX is imported in this process already, and looks for cuDNN's libraries once")
    paths = [_library_path(package, file) for package, file in LIBRARIES]
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LibraryError("there is no C compiler (cc) to stand in for the driver with; install gcc")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _build_stub(compiler, _DRIVER_SOURCE, Path(folder) / "libcuda.so.1")
            runtime = _build_stub(compiler, _RUNTIME_SOURCE, Path(folder) / "libcudart.so.12")
        for path in paths:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise LibraryError(f"it cannot be loaded: {reason}") from error
    return CudnnLibrary(runtime)


def _library_path(package: str, file: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError(f"{package} is not installed; {REMEDY}") from None
    if package == "nvidia-cudnn-cu12" and distribution.version != VERSION:
        raise LibraryError(f"{package} is {distribution.version}, and plans are made with {VERSION}; {REMEDY}")
    path = Path(str(distribution.locate_file(file)))
    if not path.is_file():
        raise LibraryError(f"{package} has no file {file}; {REMEDY}")
    return path


def _build_stub(compiler: str, source: str, path: Path) -> ctypes.CDLL:
    """Compile C source to a stub library at `path`, and load it. Libraries that link to this file name then use the stub."""
    command = [compiler, "-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), "-xc", "-"]
    subprocess.run(command, input=source, encoding="utf-8", capture_output=True, check=True)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
