"""Driver, CUDA, cuDNN and NCCL: whether what is installed fits together, and whether it is what gets loaded."""

import re
from collections.abc import Iterable

from jaxtrain.preflight.check import Check, Node, Subject, listed

# Lowest driver for a CUDA version: CUDA Toolkit release notes, "CUDA Toolkit and minimum required driver versions".
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
# Libraries that the wheels bring. JAX's plugin loads most of them by their full path when it starts, and then another copy in
# LD_LIBRARY_PATH stays outside (jax_plugins/xla_cuda12). Not so the parts of cuDNN and nvJitLink, which others load by name.
OURS = re.compile(r"lib(cudnn\w*|nccl|cublas\w*|cudart|cusolver\w*|cusparse|cufft|cupti|nvJitLink)\.so(\.[\d.]+)?")
BY_NAME = r"libcudnn_\w+\.so\.{cudnn}|libnvJitLink\.so\.{cuda}"  # the very name that is asked for

DRIVER = Subject(
    "driver",
    "at least what jaxlib's CUDA needs",
    "An older driver refuses the CUDA that JAX brings: training ends before its first step, or falls back to the CPU.",
    "Install a newer driver, or the CUDA that this one knows: JAXTRAIN_CUDA=12 ./run.sh setup needs 525.60.13, "
    "13 needs 580.65.06.",
)
PLUGIN = Subject(
    "CUDA plugin",
    "jax, jaxlib and one CUDA plugin of the same version",
    "Without the plugin JAX sees no GPU and trains on the CPU; with two or with another version it may not start.",
    "Install it anew: delete .venv, and run JAXTRAIN_CUDA=12 ./run.sh setup (or 13).",
)
WHEELS = Subject(
    "CUDA wheels",
    "cuDNN, NCCL, cuBLAS and the others as the plugin asks",
    "Libraries that the plugin was not built for fail when they are first called, or compute on slower paths.",
    "Install the locked set: ./run.sh setup.",
)
LIBRARIES = Subject(
    "library path",
    "no part of cuDNN and no nvJitLink in LD_LIBRARY_PATH",
    "The loader takes those before the ones that the other libraries belong to: a cuDNN of two versions fails, or is slow.",
    "unset LD_LIBRARY_PATH, or take the folders of CUDA and cuDNN out of it.",
)


def plugins_of(node: Node) -> list[str]:
    """The CUDA versions that a plugin of JAX is installed for."""
    return sorted(m[1] for name in node.machine.packages() if (m := re.fullmatch(r"jax-cuda(\d+)-plugin", name)))


def driver(node: Node) -> Check:
    plugins = plugins_of(node)
    cuda = plugins[0] if len(plugins) == 1 else ""
    have = node.gpus.rows[0]["driver_version"] if node.gpus.rows else None
    if not have or cuda not in DRIVERS:
        return DRIVER.unknown("the CUDA that JAX brings is not known" if have else "nvidia-smi does not tell it")
    seen = f"{have}; CUDA {cuda} needs {DRIVERS[cuda]}"
    return DRIVER.ok(seen) if numbers(have) >= numbers(DRIVERS[cuda]) else DRIVER.fault(seen)


def plugin(node: Node) -> Check:
    packages, plugins = node.machine.packages(), plugins_of(node)
    if not plugins:
        return PLUGIN.fault("no CUDA plugin of JAX is installed")
    if len(plugins) > 1:
        return PLUGIN.fault(f"plugins for CUDA {' and '.join(plugins)} beside each other")
    name = f"jax-cuda{plugins[0]}"
    versions = {n: packages[n]["version"] for n in ("jax", "jaxlib", f"{name}-plugin", f"{name}-pjrt") if n in packages}
    seen = listed([f"{n} {v}" for n, v in versions.items()])
    if len(versions) < 4 or len({release(versions[n]) for n in ("jaxlib", f"{name}-plugin", f"{name}-pjrt")}) > 1:
        return PLUGIN.fault(seen)
    return PLUGIN.ok(seen)


def wheels(node: Node) -> Iterable[Check]:
    """What the plugin's extra with-cuda requires, against what is installed."""
    packages, wrong, found = node.machine.packages(), [], []
    if not (plugins := plugins_of(node)):
        return
    asked = [text for text in packages[f"jax-cuda{plugins[0]}-plugin"]["requires"] if "with-cuda" in text]
    for text in asked:
        name, bounds = re.fullmatch(r"([\w-]+)\s*([^;]*?)\s*(?:;.*)?", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
        name = name.lower().replace("_", "-")
        if name in packages:
            found.append(name)
            have = packages[name]["version"]
            wrong += [] if within(have, bounds) else [f"{name} {have} (needs {bounds})"]
        else:
            wrong.append(f"{name} is missing")
    tell = [n for n in found if re.search("cudnn|nccl|cublas", n)]
    if asked and not found:
        yield WHEELS.note("none of them: JAX takes the system's, whose versions are not known here")
    elif wrong:
        yield WHEELS.fault(listed(wrong))
    else:
        yield WHEELS.ok(listed([f"{n} {packages[n]['version']}" for n in tell]))


def libraries(node: Node) -> Check:
    packages, path = node.machine.packages(), node.machine.environ().get("LD_LIBRARY_PATH", "")
    if not path:
        return LIBRARIES.ok("LD_LIBRARY_PATH is not set")
    folders = dict.fromkeys(folder for folder in path.split(":") if folder)
    found = [f"{folder}/{name}" for folder in folders for name in node.machine.listing(folder) if OURS.fullmatch(name)]
    if not found:
        return LIBRARIES.ok(f"none in {path}")
    cuda = "|".join(plugins_of(node))
    # Where the wheels bring no cuDNN, these are the ones JAX is meant to take.
    cudnn = packages.get(f"nvidia-cudnn-cu{cuda}", {"version": ""})["version"].partition(".")[0]
    first = [each for each in found if re.search(f"/({BY_NAME.format(cudnn=cudnn, cuda=cuda)})$", each)] if cudnn else []
    return LIBRARIES.fault(listed(first)) if first else LIBRARIES.note(f"{listed(found)}; JAX loads its own before them")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))


def release(version: str) -> tuple[int, ...]:
    """0.11.2 of 0.11.2.dev3 and the like."""
    return numbers(version)[:3]


def within(version: str, bounds: str) -> bool:
    """Whether a version keeps `>=9.10,<10.0`; True where there are no bounds. Numbers only, which is all these wheels have."""

    def compare(text: str) -> bool:
        sign, other = re.fullmatch(r"\s*(<=|>=|==|!=|<|>)\s*([\w.*]+)\s*", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
        width = max(len(numbers(version)), len(numbers(other)))
        a, b = ((*numbers(v), *[0] * width)[:width] for v in (version, other))
        return {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b, "==": a == b, "!=": a != b}[sign]

    return all(compare(each) for each in bounds.split(",") if re.match(r"\s*[<>=!]", each))


PARTS = ((DRIVER, driver), (PLUGIN, plugin), (WHEELS, wheels), (LIBRARIES, libraries))
