"""Checks of the software: driver and CUDA wheels, and the environment variables of the run."""

import ipaddress
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxtrain.config import environment
from jaxtrain.config.hardware import Devices
from jaxtrain.node.machine import visible
from jaxtrain.node.table import Context, Table, Verdict, fault, listed, note, ok, unknown
from jaxtrain.runtime.cluster import node_names

VERSIONS, VARIABLES = Table(), Table()

# CUDA version -> lowest driver (CUDA Toolkit release notes, "CUDA Toolkit and minimum required driver versions").
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
# Libraries in the wheels. JAX's plugin loads most of them by full path (jax_plugins/xla_cuda12), so copies in LD_LIBRARY_PATH
# are not used. But other libraries load nvJitLink and the sub-libraries of cuDNN by name.
WHEEL_LIBRARIES = re.compile(r"lib(cudnn\w*|nccl|cublas\w*|cudart|cusolver\w*|cusparse|cufft|cupti|nvJitLink)\.so(\.[\d.]+)?")
LOADED_BY_NAME = r"libcudnn_\w+\.so\.{cudnn}|libnvJitLink\.so\.{cuda}"


def cuda_plugins(c: Context) -> list[str]:
    """Return the CUDA versions for which a plugin of JAX is installed."""
    return sorted(m[1] for package in c.facts.packages if (m := re.fullmatch(r"jax-cuda(\d+)-plugin", package)))


@VERSIONS.add(
    "driver",
    expected="at least what jaxlib's CUDA needs",
    why="An older driver refuses JAX's CUDA: training ends before its first step, or falls back to the CPU.",
    fix="Install a newer driver, or a CUDA that this one supports: JAXTRAIN_CUDA=12 ./run.sh setup needs 525.60.13, 13 needs "
    "580.65.06.",
)
def driver(c: Context) -> Verdict:
    plugins = cuda_plugins(c)
    cuda = plugins[0] if len(plugins) == 1 else ""
    installed = c.facts.nvml.get("driver")
    if not installed or cuda not in DRIVERS:
        return unknown("the CUDA version of JAX is not known" if installed else "not reported by NVML")
    seen = f"{installed}; CUDA {cuda} needs {DRIVERS[cuda]}"
    return ok(seen) if Version(installed) >= Version(DRIVERS[cuda]) else fault(seen)


@VERSIONS.add(
    "CUDA plugin",
    expected="jax, jaxlib and one CUDA plugin of the same version",
    why="Without the plugin JAX finds no GPU and trains on the CPU; with two or with another version it may not start.",
    fix="Install it again: delete .venv, and run JAXTRAIN_CUDA=12 ./run.sh setup (or 13).",
)
def cuda_plugin(c: Context) -> Verdict:
    packages, plugins = c.facts.packages, cuda_plugins(c)
    if len(plugins) != 1:
        return fault(f"plugins for CUDA {' and '.join(plugins)}" if plugins else "no CUDA plugin of JAX is installed")
    wheels = ("jax", "jaxlib", f"jax-cuda{plugins[0]}-plugin", f"jax-cuda{plugins[0]}-pjrt")
    versions = {name: packages[name]["version"] for name in wheels if name in packages}
    seen = listed([f"{name} {version}" for name, version in versions.items()])
    releases = {Version(versions[name]).base_version for name in wheels[1:] if name in versions}  # 0.11.2 of 0.11.2.dev3
    return ok(seen) if len(versions) == 4 and len(releases) == 1 else fault(seen)


@VERSIONS.add(
    "CUDA wheels",
    expected="cuDNN, NCCL, cuBLAS and the others in the versions that the plugin requires",
    why="Libraries that the plugin was not built for fail at their first call, or compute on slower paths.",
    fix="Install the locked set: ./run.sh setup.",
)
def cuda_wheels(c: Context) -> Verdict | None:
    """Compare the installed wheels with the requirements of the extra `with-cuda` of JAX's plugin; None without a plugin."""
    packages, plugins = c.facts.packages, cuda_plugins(c)
    if not plugins:
        return None
    required = [Requirement(text) for text in packages[f"jax-cuda{plugins[0]}-plugin"]["requires"] if "with-cuda" in text]
    wrong, found = [], []
    for wheel in required:
        name = canonicalize_name(wheel.name)
        if version := packages.get(name, {}).get("version"):
            found.append(f"{name} {version}")
            fits = wheel.specifier.contains(version, prereleases=True)
            wrong += [] if fits else [f"{name} {version} (needs {wheel.specifier})"]
        else:
            wrong.append(f"{name} is missing")
    if required and not found:
        return note("none of them: JAX uses the system's libraries, whose versions are not known here")
    shown = [text for text in found if re.search("cudnn|nccl|cublas", text)]
    return fault(listed(wrong)) if wrong else ok(listed(shown))


@VERSIONS.add(
    "library path",
    expected="no part of cuDNN and no nvJitLink in LD_LIBRARY_PATH",
    why="The loader prefers them to the parts that match the other libraries: a cuDNN of two versions fails, or is slow.",
    fix="unset LD_LIBRARY_PATH, or remove the folders of CUDA and cuDNN from it.",
)
def library_path(c: Context) -> Verdict:
    packages, path = c.facts.packages, c.facts.environ.get("LD_LIBRARY_PATH", "")
    if not path:
        return ok("LD_LIBRARY_PATH is not set")
    folders = dict.fromkeys(folder for folder in path.split(":") if folder)
    found = [
        f"{folder}/{name}" for folder in folders for name in c.facts.folders.get(folder, ()) if WHEEL_LIBRARIES.fullmatch(name)
    ]
    if not found:
        return ok(f"none in {path}")
    cuda = "|".join(cuda_plugins(c))
    # Without a cuDNN wheel, JAX uses the system's cuDNN, so these copies are intended.
    cudnn = packages.get(f"nvidia-cudnn-cu{cuda}", {"version": ""})["version"].partition(".")[0]
    by_name = re.compile(f"/({LOADED_BY_NAME.format(cudnn=cudnn, cuda=cuda)})$")
    preferred = [library for library in found if cudnn and by_name.search(library)]
    return fault(listed(preferred)) if preferred else note(f"{listed(found)}; JAX loads its own first")


# ---- variables

MNNVL, VISIBLE = "NCCL_MNNVL_ENABLE", "CUDA_VISIBLE_DEVICES"
RACKS = ("GB200", "GB300")  # models whose NVLink connects several nodes
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def mnnvl_enabled(c: Context) -> bool:
    """Return whether NCCL_MNNVL_ENABLE=1 is set although these GPUs have no NVLink between nodes."""
    return c.facts.environ.get(MNNVL) == "1" and not any(rack in model for rack in RACKS for model in c.gpus.names)


@VARIABLES.add(
    "variables",
    expected="none that a run refuses",
    why="JAX does not start with it, the same config would silently give other results, or it contradicts a key.",
    fix="unset it.",
)
def refused_by_the_run(c: Context) -> Verdict:
    """Apply the rules of the run to the variables of this node."""
    if not c.gpus.rows:
        return ok("none")
    row = c.gpus.rows[0]
    # If NVML reports no memory size, an arbitrary size is used, since the names of variables matter more.
    sm, gib = round(10 * float(row.get("compute_capability", 0))), row["memory"]["total_gib"] if "memory" in row else 1.0
    devices = Devices("gpu", row["name"], c.gpus.count, gib, "NVML", sm)
    overlay, problems = environment.overlay(c.run, devices, c.facts.environ)
    found = [p for p in problems if p.key in c.facts.environ]
    if found:
        seen = listed([f"{p.key}={p.value}" for p in found])
        return fault(seen, fix=" ".join(dict.fromkeys(p.remedy for p in found)))
    taken = [f"{name}={value}" for name, value in overlay.inherited.items()]
    return note(f"{listed(taken)}: the run takes them") if taken else ok("none")


@VARIABLES.add(
    MNNVL,
    expected="not 1: NVLink ends at the node",
    why="NCCL then looks for NVLink between nodes, which only racks such as GB200 NVL72 have, and fails to start.",
    fix=f"unset {MNNVL}.",
)
def mnnvl(c: Context) -> Verdict | None:
    return fault("1") if mnnvl_enabled(c) else None


@VARIABLES.add(
    "proxy",
    expected="no proxy between the run's processes",
    why="gRPC, by which the processes connect, uses http_proxy and https_proxy: they wait for process 0 until they give up.",
    fix="Add the nodes to no_proxy (and NO_PROXY), or unset the proxy for the run.",
)
def proxy(c: Context) -> Verdict:
    environ = c.facts.environ
    found = {name: environ[name] for each in PROXIES for name in (each, each.upper()) if environ.get(name)}
    if not found:
        return ok("none set")
    seen = listed([f"{name}={value}" for name, value in found.items()])
    if c.cluster is None:
        return note(f"{seen}; a run of one process connects to none", fix="Nothing, until it has more than one process.")
    hosts = [c.cluster.coordinator.rpartition(":")[0].strip("[]"), *node_names(environ.get("SLURM_STEP_NODELIST", ""))]
    hosts = list(dict.fromkeys(hosts))
    exceptions = ",".join(environ.get(name, "") for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"))
    through = [host for host in hosts if not bypasses(host, exceptions)]
    if not through:
        return ok(f"{seen}, and not for {listed(hosts)}")
    fix = f"export no_proxy={','.join(hosts)} (added to what is there), or unset the proxy for the run."
    return fault(f"{seen}, also for {listed(through)}", fix=fix)


def bypasses(host: str, no_proxy: str) -> bool:
    """Return whether a host is local, or no_proxy has its name, a domain at its end, a range with its address, or *."""
    for entry in filter(None, (part.strip() for part in no_proxy.split(","))):
        if entry == "*" or host == entry.lstrip(".") or host.endswith("." + entry.lstrip("*.")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:  # a name, not an address
            continue
    return host in ("localhost", "127.0.0.1", "::1")


@VARIABLES.add(
    VISIBLE,
    expected="unset, or the same for all processes of a node",
    why="A GPU with number 0 in every process has no number that the node, NVML and the receipt share; jaxtrain gives "
    "processes their GPUs by --local-devices, which then names GPUs that are absent.",
    fix="unset CUDA_VISIBLE_DEVICES in the processes. Slurm: srun --gpus-per-node=8 (or --gres), not --gpus-per-task or "
    "--gpu-bind.",
)
def visible_devices(c: Context) -> Verdict:
    value = c.facts.environ.get(VISIBLE)
    if value is None:
        return ok("unset")
    if value.strip() in ("", "-1", "NoDevFiles"):
        return fault(f"{value!r} hides all GPUs", fix=f"unset {VISIBLE}.")
    entries = [part.strip() for part in value.split(",") if part.strip()]
    every = c.gpus.every
    if absent := [entry for entry in entries if not visible(every, entry)]:
        return fault(f"{value}: there is no GPU {listed(absent)}", fix=f"unset {VISIBLE}, or name GPUs 0 to {len(every) - 1}.")
    ids = c.cluster.local_device_ids if c.cluster else None
    if ids and max(ids) >= len(entries):
        own = f"this process's GPU is number {listed([str(i) for i in ids])} of those, of which there is {len(entries)}"
        return fault(f"{value} in one of several processes of the node: {own}")
    if len(entries) < len(every):
        return note(
            f"{value}: {len(entries)} of {len(every)} GPUs", fix=f"Nothing, if they are meant; otherwise unset {VISIBLE}."
        )
    if c.gpus.indices == sorted(c.gpus.indices):
        return ok(value)
    return note(f"{value}: in another order than the node's", fix="Nothing, if it is meant.")
