"""The command that a stopped run prints, of a real process with the variables of its shell."""

import os
import shlex
import subprocess
import sys

from jaxtrain.config import launch


def test_a_run_that_is_stopped_before_its_first_step_names_its_command_with_the_shells_variables(tmp_path):
    """Those that decide its devices and modules, without the repository, which run.sh adds to PYTHONPATH."""
    own = tmp_path / "my parts"
    argv = ["--config=configs/tiny.py", f"--workdir={tmp_path}/run", "--config.train.max_minutes=0.001"]
    shell = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": f"{launch.REPO}{os.pathsep}{own}", "JAXTRAIN_COMMAND_PREFIX": "./run.sh"}
    hidden = (*launch.DECIDING, "JAXTRAIN_EXPORTED", "XLA_FLAGS")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-m", "jaxtrain.main", *argv]
    done = subprocess.run(command, cwd=launch.REPO, env=clean | shell, capture_output=True, encoding="utf-8")
    assert done.returncode == 75, done.stderr
    (resume,) = (line for line in done.stdout.splitlines() if "resume: " in line)
    assert shlex.split(resume) == ["resume:", "JAX_NUM_CPU_DEVICES=2", f"PYTHONPATH={own}", "./run.sh", *argv]
