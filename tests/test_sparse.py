"""Sparse gradients, such as those of embeddings: equal to the dense ones, row by row."""

import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import vrgd_tf
from tests import harness, reference

ROWS, WIDTH, IDS = 9, 3, 5
SETTINGS = {
    "plain": {},
    "scaled": {"loss_scale_factor": 8.0},
    "clipvalue": {"clipvalue": 0.3},
    "clipnorm": {"clipnorm": 0.5},
    "global": {"global_clipnorm": 0.5, "loss_scale_factor": 0.5},
}


def sparse_samples(rng, updates, k, scale=1.0):
    """(ids, rows) of each sample. Rows 0 and 8 are never seen, 7 by the first sample only; ids repeat within one."""
    result = []
    for _ in range(updates):
        ids = rng.integers(1, 7, size=(k, IDS))
        ids[:, 1] = ids[:, 0]
        ids[0, 2] = 7
        result.append((np.int32(ids), np.float32(scale * rng.normal(size=(k, IDS, WIDTH)))))
    return result


def dense(ids, rows):
    """The gradient that a sample stands for, in float64."""
    table = np.zeros((ROWS, WIDTH))
    np.add.at(table, ids, rows.astype(np.float64))
    return table


def train(make_optimizer, start, samples, replicas, wrap=lambda optimizer: optimizer):
    """As harness.train, on one table and sparse samples; the optimizer and the table after the last update."""
    strategy = harness.strategy_of(replicas)
    with strategy.scope():
        table = harness.make_variables([start])
        optimizer = wrap(make_optimizer())

    def on_replica(ids, rows):
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.IndexedSlices(tf.gather(rows, i) / replicas, tf.gather(ids, i), dense_shape=(ROWS, WIDTH))
        optimizer.apply([gradient], table)

    step = tf.function(lambda ids, rows: strategy.run(on_replica, args=(ids, rows)))
    for ids, rows in samples:
        for at in range(0, len(ids), replicas):
            step(tf.constant(ids[at : at + replicas]), tf.constant(rows[at : at + replicas]))
    harness.check_replicas_agree(table + optimizer.variables)
    return optimizer, table[0].numpy()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("replicas, steps", [(4, None), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_sparse_gradients_equal_the_float64_reference_on_dense_ones(name, replicas, steps, setting, rng):
    start = np.float32(rng.normal(size=(ROWS, WIDTH)))
    samples = sparse_samples(rng, 3, 4)
    cls, arguments, rule = harness.OPTIMIZERS[name]
    settings = SETTINGS[setting]
    factor = settings.get("loss_scale_factor", 1.0)
    _, found = train(
        lambda: cls(**arguments, **settings, gradient_accumulation_steps=steps),
        start,
        [(ids, rows * np.float32(factor)) for ids, rows in samples],
        replicas,
    )
    clipping = {key: value for key, value in settings.items() if key.startswith(("clip", "global"))}
    oracle = reference.Optimizer(values=[start], **(arguments | rule | clipping))
    for ids, rows in samples:
        oracle.update([[dense(*sample)] for sample in zip(ids, rows, strict=True)])
    harness.assert_weights_close([found], oracle.w, 1e-5)


@pytest.mark.parametrize("replicas, steps", [(4, None), (2, 2)])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_untouched_rows_keep_their_weights_without_decay(name, replicas, steps, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = np.float32(rng.normal(size=(ROWS, WIDTH)))
    arguments = arguments | {"weight_decay": None, "gradient_accumulation_steps": steps}
    _, found = train(lambda: cls(**arguments), start, sparse_samples(rng, 3, 4), replicas)
    np.testing.assert_array_equal(found[[0, 8]], start[[0, 8]])
    assert np.all(found[1:8] != start[1:8])


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_untouched_rows_do_not_disturb_the_normalisation_of_the_layer(name, rng):
    """A table with a thousand more rows takes the same steps where it is touched.

    Without layer adaptation and decay, where more rows would count, rightly.
    """
    cls, arguments, _ = harness.OPTIMIZERS[name]
    arguments = arguments | {"weight_decay": None}
    if "LA" in name:
        arguments["exclude_from_layer_adaptation"] = ["."]
    small = np.float32(rng.normal(size=(ROWS, WIDTH)))
    large = np.concatenate([small, np.float32(rng.normal(size=(1000, WIDTH)))])
    columns = [[dense(*sample) for sample in zip(ids, rows)] for ids, rows in sparse_samples(rng, 2, 4)]

    def trained(start):
        padding = [(0, len(start) - ROWS), (0, 0)]
        samples = [[[np.float32(np.pad(gradient, padding))] for gradient in update] for update in columns]
        return harness.train(lambda: cls(**arguments), [start], samples, 4).weights[-1][0]

    np.testing.assert_allclose(trained(large)[:ROWS], trained(small), rtol=2e-6, atol=1e-7)


def test_loss_scale_optimizer_takes_sparse_gradients(rng):
    start, samples = np.float32(rng.normal(size=(ROWS, WIDTH))), sparse_samples(rng, 2, 2)
    scaled = [(ids, rows * 256) for ids, rows in samples]
    wrap = lambda inner: vrgd_tf.LossScaleOptimizer(inner, initial_scale=256.0)  # noqa: E731
    optimizer, found = train(lambda: vrgd_tf.VRAdam(0.1), start, scaled, 2, wrap)
    _, expected = train(lambda: vrgd_tf.VRAdam(0.1), start, samples, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    scaled[1][1][1, 2] = np.inf
    optimizer, found = train(lambda: vrgd_tf.VRAdam(0.1), start, scaled, 2, wrap)
    _, expected = train(lambda: vrgd_tf.VRAdam(0.1), start, samples[:1], 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert int(optimizer.skipped_updates) == 1


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_embedding_layer_equals_a_dense_layer_on_one_hot_inputs(name, steps):
    """In a Keras train step on 2 replicas, with a loss scale and clipping."""
    cls, arguments, _ = harness.OPTIMIZERS[name]
    ids = np.random.default_rng(4).integers(1, ROWS - 1, size=(8, IDS))
    ids[:, 0] = ids[:, 1]
    target = np.float32(np.random.default_rng(5).normal(size=(8, 2)))

    def trained(embedding, inputs):
        keras.utils.set_random_seed(1)
        with harness.strategy_of(2).scope():
            pooling = keras.layers.GlobalAveragePooling1D()
            model = keras.Sequential([keras.Input(inputs.shape[1:]), embedding, pooling, keras.layers.Dense(2)])
            values = np.random.default_rng(6).normal(size=(ROWS, WIDTH))
            embedding.set_weights([values])
            optimizer = cls(**arguments, loss_scale_factor=4.0, global_clipnorm=0.5, gradient_accumulation_steps=steps)
            model.compile(optimizer=optimizer, loss="mse")
        for _ in range(4):
            harness.train_on_batches(model, inputs, target, 8)
        return model.get_weights(), values

    found, start = trained(keras.layers.Embedding(ROWS, WIDTH), ids)
    expected, _ = trained(keras.layers.Dense(WIDTH, use_bias=False), np.float32(np.eye(ROWS)[ids]))
    harness.assert_weights_close(found, expected, 1e-5)
    assert np.all(found[0][ids[0, 0]] != start[ids[0, 0]])


@pytest.mark.parametrize("name, replicas, steps", [("VRSGD", 2, 0), ("VRLAMB", 1, 2)])
def test_a_million_rows_take_a_step_within_four_times_their_state(name, replicas, steps):
    """Weights, slots and accumulators of all replicas are the state; 0.5 and 1.5 GB of it here."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.embedding_memory", name, str(replicas), str(steps)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert float(re.search(r"peak / state = ([\d.]+)", result.stdout)[1]) <= 4
