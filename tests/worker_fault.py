"""One worker of a MultiWorkerMirroredStrategy that saves checkpoints, and resumes from the latest one.

python -m tests.worker_fault DIRECTORY STEPS EVERY [HOLD], with TF_CONFIG set. It saves every EVERY steps, and reports
in lines "resumed at N" and "step N". With HOLD it stops after that step, and waits to be killed. At the end it writes
its weights and slots to DIRECTORY/out<index>.npz.
"""

import os
import pathlib
import signal
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf

import vrgd_tf


def make_step(strategy, model, optimizer):
    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(lambda x, y: strategy.run(on_replica, args=(x, y)))


def batch(step, index):
    """The examples of a step and a worker, the same whenever they are asked for."""
    rng = np.random.default_rng([step, index])
    x = np.float32(rng.normal(size=(8, 6)))
    return tf.constant(x), tf.constant(np.sin(x.sum(axis=1, keepdims=True)))


def main(directory, steps, every, hold=None):
    directory, steps, every, hold = pathlib.Path(directory), int(steps), int(every), hold and int(hold)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        optimizer = vrgd_tf.VRMomentum(0.05, gradient_accumulation_steps=4)
        optimizer.build(model.trainable_variables)
    step = make_step(strategy, model, optimizer)
    done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    latest = tf.train.latest_checkpoint(directory / "checkpoints")
    if latest:
        checkpoint.restore(latest).assert_existing_objects_matched()
    print("resumed at", int(done), flush=True)
    # All workers take part in a save, but only what the chief writes is kept.
    with tempfile.TemporaryDirectory(dir=directory) as unused:
        manager = tf.train.CheckpointManager(checkpoint, directory / "checkpoints" if index == 0 else unused, 2)
        for number in range(int(done) + 1, steps + 1):
            step(*batch(number, index))
            done.assign_add(1)
            if number % every == 0:
                manager.save()
            print("step", number, flush=True)
            if number == hold:
                signal.pause()
    variables = model.variables + optimizer.variables
    np.savez(directory / f"out{index}.npz", **{f"v{i}": variable.numpy() for i, variable in enumerate(variables)})


if __name__ == "__main__":
    main(*sys.argv[1:])
