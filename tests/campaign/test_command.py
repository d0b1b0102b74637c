"""Commands in their own processes: mistakes give exit code 2, validation imports no JAX, --help lists the commands."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a new home and working folder, on 8 fake CPU devices."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    env |= {"PYTHONPATH": str(REPO), "HOME": str(cwd), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_mistakes_end_the_real_command_with_2_and_leave_no_file(tmp_path):
    wrong = ["--config.model.num_layer=3", "--config.train.steps=1e3", "--config.mesh.tensor=8", "stray"]
    done = python("-m", "jaxtrain.main", f"--config={REPO}/configs/tiny.py", *wrong, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.endswith("4 problems; nothing was started and nothing written\n")
    assert not list(tmp_path.iterdir())


def test_help_and_validation_import_no_jax(tmp_path):
    """Validation imports no JAX, because the memory budget is set after validation and before the import of JAX."""
    done = python("-m", "jaxtrain.main", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--config.KEY=VALUE" in done.stdout and "llama3_70b" in done.stdout
    for code in (
        "import jaxtrain.main, jaxtrain.models, jaxtrain.models.families.llama; found = []",
        "from pathlib import Path; from jaxtrain import hardware, launch; from jaxtrain.validate import validate;"
        "found = validate(launch.load([]).run, hardware.probe(), Path('runs/test')); print(*found)",
    ):
        assert python("-c", f"import sys; {code}; sys.exit('jax' in sys.modules or len(found))", cwd=tmp_path).returncode == 0


def test_the_package_lists_its_commands(tmp_path):
    listed = python("-m", "jaxtrain", "--help", cwd=tmp_path)
    assert listed.returncode == 0 and "python -m jaxtrain.main " in listed.stdout
    wrong = python("-m", "jaxtrain", "main", cwd=tmp_path)
    assert wrong.returncode == 2 and "Fix: python -m jaxtrain.main --config=FILE." in wrong.stderr
