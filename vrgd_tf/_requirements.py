"""Says in one sentence what is missing, where TensorFlow is not there or Keras runs on something else."""

import importlib.util
import json
import os
import sys

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "vrgd_tf needs TensorFlow, which is not installed: pip install 'vrgd_tf[tensorflow]', or 'vrgd_tf[tpu]' on a "
        "TPU VM."
    )


def _keras_backend():
    if "keras" in sys.modules:
        return sys.modules["keras"].config.backend()
    # Read before Keras is imported: with a backend that is not installed, that import fails with another message.
    home = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    try:
        with open(os.path.join(home, "keras.json")) as file:
            configured = json.load(file).get("backend")
    except (OSError, ValueError):
        configured = None
    return os.environ.get("KERAS_BACKEND") or configured or "tensorflow"


if _keras_backend() != "tensorflow":
    raise ImportError(
        f"vrgd_tf needs the TensorFlow backend of Keras, and this Keras runs on {_keras_backend()!r}: set "
        "KERAS_BACKEND=tensorflow, or the backend in keras.json, before Keras is imported."
    )
