"""A training process of test_callbacks.py: 2 replicas, fit, BackupAndRestore; it may kill itself while saving."""

import os
import pathlib
import signal
import sys

import keras
import numpy as np

import vrgd_tf
from tests import conftest, harness  # noqa: F401  (the former sets the logical devices)

EPOCHS, BATCHES = 6, 10


class Progress(keras.callbacks.Callback):
    """One line for each batch, for the test that kills this process to wait for."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"batch {self.epoch} {batch}", flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def model_of(steps, replicas=2):
    keras.utils.set_random_seed(1)
    with harness.strategy_of(replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        rate = keras.optimizers.schedules.CosineDecay(0.05, 60)
        optimizer = vrgd_tf.VRLAMB(rate, weight_decay=0.01, gradient_accumulation_steps=steps, use_ema=True)
        model.compile(optimizer=optimizer, loss="mse")
    return model


def kill_in_save(epoch, model):
    """The process dies when half of that epoch's backup is written."""
    save_weights = model.save_weights

    def save_half(path, **arguments):
        save_weights(path, **arguments)
        if len(list(pathlib.Path(path).parent.glob("epoch-*"))) + 1 == epoch:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    model.save_weights = save_half


def main(directory, result, steps, die_in_epoch):
    model = model_of(int(steps) or None)
    if int(die_in_epoch):
        kill_in_save(int(die_in_epoch), model)
    x = np.float32(np.random.default_rng(0).normal(size=(BATCHES * 8, 3)))
    callback = vrgd_tf.BackupAndRestore(directory, keep=EPOCHS, delete_checkpoint=False)
    model.fit(x, x[:, :1] ** 2, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[callback, Progress()])
    variables = model.variables + model.optimizer.variables
    state = [variable.numpy() for variable in variables if variable.synchronization != "on_read"]
    np.savez(result, *state, iterations=int(model.optimizer.iterations))


if __name__ == "__main__":
    main(*sys.argv[1:])
