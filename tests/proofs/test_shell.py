"""Variables of the shell that JAX or XLA cannot read are refused before they end the process."""

import os
import subprocess
import sys

import pytest

START = """
from jaxtrain.config import hardware, schema
from jaxtrain.runtime import startup
try:
    startup.start_jax(hardware.probe())
except schema.ConfigError as error:
    print(*[problem.key for problem in error.problems])
"""


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("JAX_LOG_COMPILES", "", ""),
        ("JAX_LOG_COMPILES", "0", ""),
        ("JAX_LOG_COMPILES", "maybe", "environment"),
        ("XLA_FLAGS", "", ""),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=1", ""),
        ("XLA_FLAGS", "--xla_backend_optimization_level=high", "XLA_FLAGS"),
        ("XLA_FLAGS", "--xla_no_such_flag=true", "XLA_FLAGS"),
        ("XLA_FLAGS", "no_such_file", "XLA_FLAGS"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused(name: str, value: str, refused: str):
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", name: value}
    command = [sys.executable, "-c", START]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert done.stdout.strip() == refused
