"""One worker of a MultiWorkerMirroredStrategy: trains on the samples in a file, writes its weights to another.

python -m tests.multiworker INPUT.npz OUTPUT.npz OPTIMIZER SETTINGS, with TF_CONFIG set. SETTINGS is JSON: "arguments"
of the optimizer, "sparse", whether its gradients are, and "initial_scale" of a LossScaleOptimizer around it, or null.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

import vrgd_tf
from tests import harness


def main(source, target, name, settings):
    settings = json.loads(settings)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    cls, arguments, _ = harness.OPTIMIZERS[name]
    with np.load(source) as archive:
        start, samples = (
            [archive[k] for k in archive if k.startswith("w")],
            [archive[k] for k in archive if k.startswith("g")],
        )
    with strategy.scope():
        variables = harness.make_variables(start)
        optimizer = cls(**(arguments | settings["arguments"]))
        if settings["initial_scale"]:
            optimizer = vrgd_tf.LossScaleOptimizer(optimizer, initial_scale=settings["initial_scale"])
    replicas = strategy.num_replicas_in_sync
    step = harness.make_step(strategy, optimizer, variables, replicas, sparse=settings["sparse"])
    updates, k = samples[0].shape[:2]
    for update in range(updates):
        for at in range(0, k, replicas):
            step([tf.constant(sample[update, at : at + replicas]) for sample in samples])
    np.savez(
        target,
        iterations=int(optimizer.iterations),
        replicas=replicas,
        skipped=int(optimizer.skipped_updates),
        scale=optimizer.dynamic_scale.numpy() if settings["initial_scale"] else 1.0,
        **{f"w{i}": v.numpy() for i, v in enumerate(variables)},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
