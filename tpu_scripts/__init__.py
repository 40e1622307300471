"""Workloads for the optimizers of vrgd_tf, from a laptop to a TPU pod."""

import os

# Before TensorFlow is imported: its notes on the machine would bury the progress bar. What fails still raises.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
