"""Keras optimizers that scale the gradient by its signal-to-noise ratio across replicas (VRGD, arXiv:2309.13681)."""

from vrgd_tf import _requirements, gsnr  # noqa: F401  (the former first: it says what is missing)
from vrgd_tf.adam import VRAdam
from vrgd_tf.callbacks import BackupAndRestore
from vrgd_tf.lamb import LAMB, VRLAMB
from vrgd_tf.lars import LARS, VRLARS
from vrgd_tf.loss_scale import LossScaleOptimizer
from vrgd_tf.sgd import VRSGD, VRMomentum

__all__ = [
    "LAMB",
    "LARS",
    "VRLAMB",
    "VRLARS",
    "VRSGD",
    "BackupAndRestore",
    "LossScaleOptimizer",
    "VRAdam",
    "VRMomentum",
    "gsnr",
]
__version__ = "0.1.0"
