"""What does an update cost? Whole `apply_gradients` in a tf.function, side by side in one process.

    python -m benchmarks.update_step --replicas=4 --rounds=20

Each round runs a stock optimizer and ours in turn, so that a change of the machine's speed meets both; medians and
their ratio are printed. The times on CPUs say nothing about TPUs.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import vrgd_tf
from vrgd_tf import replicas

# Tensors of a small BERT: an embedding and layers of attention and feed-forward, 24M parameters.
SHAPES = [(30522, 512)] + 4 * ([(512, 512)] * 4 + [(512,)] * 6 + [(512, 1024), (1024,), (1024, 512)])
PAIRS = [
    ("SGD(momentum)", lambda: keras.optimizers.SGD(1e-3, momentum=0.9), "VRMomentum", lambda: vrgd_tf.VRMomentum(1e-3)),
    ("AdamW", lambda: keras.optimizers.AdamW(1e-3), "VRAdam", lambda: vrgd_tf.VRAdam(1e-3, weight_decay=0.004)),
    ("Lamb", lambda: keras.optimizers.Lamb(1e-3), "LAMB", lambda: vrgd_tf.LAMB(1e-3)),
    ("Lamb", lambda: keras.optimizers.Lamb(1e-3), "VRLAMB", lambda: vrgd_tf.VRLAMB(1e-3)),
]


def make_step(strategy, make_optimizer):
    """A function without arguments that applies one set of gradients, different on each replica."""
    with strategy.scope():
        variables = [keras.Variable(np.full(shape, 0.1, "float32"), aggregation="mean") for shape in SHAPES]
        gradients = [replicas.local_variable(shape, "float32", "gradient") for shape in SHAPES]
        optimizer = make_optimizer()
        optimizer.build(variables)

    @tf.function
    def fill():
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            for gradient in gradients:
                gradient.assign(tf.random.stateless_normal(gradient.shape, (replica, 0)))

        strategy.run(on_replica)

    def on_replica():
        optimizer.apply_gradients(zip(map(tf.convert_to_tensor, gradients), variables, strict=True))

    @tf.function
    def step():
        strategy.run(on_replica)

    fill()
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * arguments.replicas
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(arguments.replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    parameters = sum(int(np.prod(shape)) for shape in SHAPES)
    print(f"{parameters / 1e6:.1f}M parameters in {len(SHAPES)} tensors, {arguments.replicas} replicas")
    print(f"{'stock Keras':>14} {'ms':>7}   {'ours':<11} {'ms':>7} {'ratio':>6} {'first step, s':>14}")
    for stock, make_stock, ours, make_ours in PAIRS:
        steps = [make_step(strategy, make) for make in (make_stock, make_ours)]
        first = []
        for step in steps:
            start = time.perf_counter()
            step()
            first.append(time.perf_counter() - start)
        times = []
        for _ in range(arguments.rounds):
            row = []
            for step in steps:
                start = time.perf_counter()
                step()
                row.append(time.perf_counter() - start)
            times.append(row)
        a, b = np.median(times, axis=0) * 1e3
        print(f"{stock:>14} {a:7.1f}   {ours:<11} {b:7.1f} {b / a:6.2f} {first[0]:6.1f} {first[1]:7.1f}", flush=True)


if __name__ == "__main__":
    main()
