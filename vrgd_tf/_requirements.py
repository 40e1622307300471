"""Says in one sentence what is missing, where TensorFlow is not there or Keras runs on something else."""

import importlib.util
import os

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "vrgd_tf needs TensorFlow, which is not installed: pip install 'vrgd_tf[tensorflow]', or 'vrgd_tf[tpu]' on a TPU VM."
    )
# Asked before Keras is imported: with a backend that is not installed, that import fails with another message.
_backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
if _backend == "tensorflow":
    import keras

    _backend = keras.backend.backend()
if _backend != "tensorflow":
    raise ImportError(
        f"vrgd_tf needs the TensorFlow backend of Keras, and this Keras runs on {_backend!r}: set "
        "KERAS_BACKEND=tensorflow, or the backend in ~/.keras/keras.json, before Keras is imported."
    )
