"""Prints the peak of a training process with a large embedding table, as a multiple of its state: test_sparse.py."""

import resource
import sys

import keras
import numpy as np
import tensorflow as tf

from tests import conftest, harness  # noqa: F401  (the former sets the logical devices)

ROWS, WIDTH, IDS = 10**6, 64, 4096


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(name, replicas, steps):
    replicas, steps = int(replicas), int(steps) or None
    tf.function(lambda x: x + 1, jit_compile=True)(tf.ones(3))  # What XLA itself takes is not the optimizer's.
    before = peak_bytes()
    strategy = harness.strategy_of(replicas)
    cls, arguments, _ = harness.OPTIMIZERS[name]
    with strategy.scope():
        table = keras.Variable("uniform", shape=(ROWS, WIDTH), dtype="float32", aggregation="mean", name="table")
        optimizer = cls(**arguments, gradient_accumulation_steps=steps)
        optimizer.build([table])

    def on_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        ids = tf.random.stateless_uniform((IDS,), (replica, 1), 0, ROWS, tf.int32)
        rows = tf.random.stateless_normal((IDS, WIDTH), (replica, 2))
        optimizer.apply([tf.IndexedSlices(rows, ids, (ROWS, WIDTH))], [table])

    step = tf.function(lambda: strategy.run(on_replica))
    for _ in range(2 * (steps or 1)):
        step()
    assert int(optimizer.iterations) == 2
    state = replicas * sum(4 * int(np.prod(variable.shape)) for variable in [table, *optimizer.variables])
    print(f"peak / state = {(peak_bytes() - before) / state:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
