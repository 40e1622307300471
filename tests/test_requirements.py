"""What is missing is said in one sentence, by a fresh process that imports the package."""

import os
import subprocess
import sys

import pytest

BLOCK = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "tensorflow" else find_spec(name, *a)
"""


def import_error(setup="", **environment):
    result = subprocess.run(
        [sys.executable, "-c", f"{setup}\nimport vrgd_tf"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_without_tensorflow():
    line = import_error(BLOCK)
    assert line.startswith("ImportError: vrgd_tf needs TensorFlow") and "pip install" in line


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_with_another_backend(backend):
    line = import_error(KERAS_BACKEND=backend)
    assert line.startswith("ImportError: vrgd_tf needs the TensorFlow backend") and repr(backend) in line


def test_with_another_backend_in_the_configuration_file(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    line = import_error(KERAS_HOME=str(tmp_path))
    assert line.startswith("ImportError: vrgd_tf needs the TensorFlow backend") and "'numpy'" in line


def test_public_names():
    import vrgd_tf

    assert sorted(vrgd_tf.__all__) == [
        "BackupAndRestore", "LAMB", "LARS", "LossScaleOptimizer", "VRAdam", "VRLAMB", "VRLARS", "VRMomentum", "VRSGD",
        "gsnr",
    ]  # fmt: skip
