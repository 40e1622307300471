"""What users of other optimizers reported, and what goes wrong silently: each behaviour has a test that holds it.

`REPORTS` says which. Most of these tests stand in other files; those here are the ones that nothing else proves. They
train end to end, and compare with the float64 reference, stock Keras, or one replica on the whole batch.

`fit` is used even for a single step: `train_on_batch` gives the whole batch to every replica, so that all gradient
samples are equal.
"""

import ast
import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import vrgd_tf
from tests import harness, reference
from tests.test_multiworker import free_ports
from vrgd_tf import rules

ROOT = pathlib.Path(__file__).parents[1]
CALLBACKS = "tests/test_callbacks.py"
LOSS_SCALE = "tests/test_loss_scale.py"
OPTIMIZER = "tests/test_optimizer.py"
OPTIMIZERS = "tests/test_optimizers.py"
STATE = "tests/test_state.py"
STRATEGIES = "tests/test_strategies.py"
HERE = "tests/test_public_reports.py"

# From a report, or a failure of stock Keras under MirroredStrategy that has no number, to the test that holds it.
REPORTS = {
    # Reported in public trackers.
    "keras#17429": (HERE, "test_accumulation_in_fit_under_a_strategy"),
    "keras-core#437": (HERE, "test_average_of_the_weights_in_fit_under_a_strategy"),
    "tf#33929": (HERE, "test_clipping_comes_after_the_reduction"),
    "keras#21366": (HERE, "test_jit_compiled_fit_under_a_mirrored_strategy_fails_in_tensorflow"),
    "keras#23085": (STRATEGIES, "test_custom_loop"),
    "build() outside strategy.scope()": (STRATEGIES, "test_custom_loop"),
    "keras#19308": (OPTIMIZERS, "test_mean_gradient_is_that_of_the_whole_batch"),
    "keras#20609": (HERE, "test_regularizer_counts_once_whatever_the_number_of_replicas"),
    "keras#21238": (HERE, "test_weights_of_16_bits_move"),
    "pytorch-lamb#6": (HERE, "test_zero_weights_learn"),
    "tinygrad#15724": (OPTIMIZER, "test_bad_argument_says_what_was_received"),
    "keras#19981": (OPTIMIZERS, "test_golden_value_of_lamb"),
    "transformers#4360": (HERE, "test_norm_scales_and_biases_take_the_plain_step_by_default"),
    "TFA#2619": (OPTIMIZER, "test_method_of_keras_excludes_variables_and_names_and_is_saved"),
    "tf#44518": (STATE, "test_resumed_run_equals_one_that_did_not_stop"),
    "keras#16983": (STATE, "test_state_that_does_not_fit_is_an_error_that_names_the_difference"),
    "tf#49208": (STATE, "test_schedule_goes_on_where_it_was"),
    "keras#19179": (CALLBACKS, "test_kill_while_saving_costs_that_epoch_only_and_is_said"),
    "TFA#2525": (OPTIMIZER, "test_schedule_counts_updates"),
    "fairscale#1062": (OPTIMIZERS, "test_replicas_and_accumulation_steps_give_the_same_update"),
    "fairscale#195": (OPTIMIZERS, "test_replicas_and_accumulation_steps_give_the_same_update"),
    "AdaScale on one worker": (OPTIMIZER, "test_one_sample_is_refused_at_the_first_update_and_not_before"),
    "negative variance": (HERE, "test_variance_is_never_negative"),
    "tf#36932": (HERE, "test_empty_replica_of_a_partial_last_batch_is_a_sample_of_zeros"),
    "tf#53160": (HERE, "test_repeated_ids_of_an_embedding_are_summed_before_they_are_squared"),
    "GradientAccumulator#6": (HERE, "test_batch_normalization_sees_the_accumulation_steps_one_by_one"),
    "keras#20585": (HERE, "test_fit_with_two_workers_fails_in_keras"),
    "pytorch/xla#2511": (HERE, "test_nothing_is_traced_after_the_first_step"),
    "Paddle#26733": (HERE, "test_norm_scales_and_biases_take_the_plain_step_by_default"),
    "Paddle#40892": (HERE, "test_weight_decay_of_zero_keeps_the_trust_ratio_of_lars"),
    # No cause is known of that one; what an optimizer can answer for is the memory that its state takes.
    "keras#18669": (OPTIMIZER, "test_words_of_state_per_parameter"),
    "int(optimizer.iterations)": (STRATEGIES, "test_made_outside_the_scope"),
    # Failures of stock Keras under MirroredStrategy.
    "gradient_accumulation_steps in fit": (HERE, "test_accumulation_in_fit_under_a_strategy"),
    "ema_overwrite_frequency in fit": (HERE, "test_average_of_the_weights_in_fit_under_a_strategy"),
    "clipnorm, global_clipnorm, clipvalue": (HERE, "test_clipping_comes_after_the_reduction"),
    "infinity on one replica": (LOSS_SCALE, "test_mixed_float16_in_fit_finds_an_overflow_on_any_replica"),
    "steps_per_execution": (STRATEGIES, "test_ways_of_compiling_agree"),
    "steps_per_execution, default collectives": (HERE, "test_several_steps_per_execution_fail_in_tensorflow"),
    "compile(jit_compile=True)": (HERE, "test_jit_compiled_fit_under_a_mirrored_strategy_fails_in_tensorflow"),
    "Embedding with loss_scale_factor": (HERE, "test_repeated_ids_of_an_embedding_are_summed_before_they_are_squared"),
    "accumulators of all replicas are saved": (
        CALLBACKS,
        "test_run_that_is_killed_ten_times_ends_with_the_same_weights",
    ),
    "state loaded before the optimizer is built": (STATE, "test_resumed_run_equals_one_that_did_not_stop"),
    "state of other variables": (STATE, "test_state_that_does_not_fit_is_an_error_that_names_the_difference"),
    "exclude_from_weight_decay": (OPTIMIZER, "test_method_of_keras_excludes_variables_and_names_and_is_saved"),
    "decay outside LAMB's trust ratio": (OPTIMIZERS, "test_golden_value_of_lamb"),
    "LAMB on 16-bit variables": (HERE, "test_weights_of_16_bits_move"),
    # What makes the signal-to-noise ratio silently wrong.
    "empty replicas": (HERE, "test_empty_replica_of_a_partial_last_batch_is_a_sample_of_zeros"),
    "empty replicas of the first batch": (HERE, "test_first_batch_that_leaves_a_replica_empty_fails_in_keras"),
    "Keras' dropout": (HERE, "test_keras_dropout_is_no_noise_between_replicas"),
    "BatchNormalization": (HERE, "test_saved_batch_statistics_are_those_of_replica_0_unless_synchronized"),
    "IndexedSlices": (HERE, "test_repeated_ids_of_an_embedding_are_summed_before_they_are_squared"),
    "input that is not sharded": (HERE, "test_replicas_that_see_the_same_samples_take_the_plain_step"),
    "train_on_batch": (HERE, "test_train_on_batch_gives_every_replica_the_whole_batch"),
    'reduction="sum"': (HERE, "test_sum_of_losses_leaves_the_ratio_as_it_is"),
}


@functools.cache
def functions_of(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_report_has_a_test():
    for report, (file, test) in REPORTS.items():
        assert test.startswith("test_") and test in functions_of(file), f"{report}: {file} has no {test}"
    own = {test for test in functions_of(HERE) if test.startswith("test_")} - {"test_every_report_has_a_test"}
    assert own == {test for file, test in REPORTS.values() if file == HERE}


# A linear model, whose gradients NumPy has in float64.


def data(rng, size=16, scale=1.0):
    return np.float32(rng.normal(size=(size, 3))), np.float32(scale * rng.normal(size=(size, 2)))


def model_of(optimizer, replicas, *layers, inputs=3, loss="mse", **compile_arguments):
    """A compiled model; one dense layer if no functions that make layers are given."""
    keras.utils.set_random_seed(1)
    with harness.strategy_of(replicas).scope():
        made = [make() for make in layers] or [keras.layers.Dense(2, bias_initializer="ones")]
        model = keras.Sequential([keras.Input((inputs,)), *made])
        model.compile(optimizer=optimizer(), loss=loss, **compile_arguments)
    return model


def fit(model, x, y, batch_size=8, **arguments):
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, **arguments)
    return model


def gradients_of(weights, x, y):
    """Those of the mean squared error of the linear model."""
    kernel, bias = weights
    error = 2 * (np.float64(x) @ kernel + bias - y) / y.size
    return [x.T @ error, error.sum(0)]


def samples_of(weights, x, y, count):
    """`count` gradient samples of equal shares of a batch, in the order in which the replicas get them."""
    pairs = zip(np.split(x, count), np.split(y, count), strict=True)
    return [gradients_of(weights, *pair) for pair in pairs]


def trained_reference(rule, weights, x, y, updates, samples, **arguments):
    """The float64 reference after so many updates from so many samples each, of equal parts of the data."""
    oracle = reference.Optimizer(rule, weights, **arguments)
    for part in zip(np.split(x, updates), np.split(y, updates), strict=True):
        oracle.update(samples_of(oracle.w, *part, samples))
    return oracle


def steps(before, model):
    return [np.float64(b) - a for b, a in zip(before, model.get_weights(), strict=True)]


def norm(tensors):
    return np.linalg.norm(np.concatenate([np.ravel(tensor) for tensor in tensors]))


# Arguments of the base optimizer, in fit.


def test_accumulation_in_fit_under_a_strategy(rng):
    """keras#17429: stock Keras raises, because it merges replicas inside a conditional."""
    x, y = data(rng, 48)
    model = model_of(lambda: vrgd_tf.VRSGD(0.3, momentum=0.9, gradient_accumulation_steps=3), 4)
    expected = trained_reference("sgd", model.get_weights(), x, y, 2, 12, learning_rate=0.3, momentum=0.9)
    fit(model, x, y)
    harness.assert_weights_close(model.get_weights(), expected.w, 1e-5)


def test_average_of_the_weights_in_fit_under_a_strategy(rng):
    """keras-core#437: stock Keras raises. The model has the average when fit ends, as Keras documents."""
    x, y = data(rng, 40)
    ema = dict(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)
    model = model_of(lambda: vrgd_tf.VRSGD(0.3, **ema), 2)
    expected = trained_reference("sgd", model.get_weights(), x, y, 5, 2, learning_rate=0.3, **ema)
    fit(model, x, y)
    harness.assert_weights_close(model.get_weights(), expected.average, 1e-5)


@pytest.mark.parametrize("clipping", [{"global_clipnorm": 0.5}, {"clipnorm": 0.5}, {"clipvalue": 0.5}], ids=str)
def test_clipping_comes_after_the_reduction(clipping, rng):
    """tf#33929: clipped on each replica, the sum of the replicas' gradients is larger than the limit, or bent."""
    x, y = data(rng, 8, scale=100)
    model = model_of(lambda: vrgd_tf.VRSGD(1.0, gamma=1.0, **clipping), 4)
    before = model.get_weights()
    step = steps(before, fit(model, x, y))
    harness.assert_weights_close(step, reference.clip(gradients_of(before, x, y), **clipping), 1e-5)
    if "global_clipnorm" in clipping:
        assert norm(step) == pytest.approx(0.5, rel=1e-6)
    elif "clipnorm" in clipping:
        assert [norm([s]) for s in step] == pytest.approx([0.5, 0.5], rel=1e-6)
    else:
        assert max(np.abs(s).max() for s in step) == pytest.approx(0.5, rel=1e-6)


def test_regularizer_counts_once_whatever_the_number_of_replicas(rng):
    """keras#20609: 4 replicas take the step of stock Keras on one replica with the whole batch."""

    def layer():
        return keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5), bias_regularizer="l1")

    x, y = data(rng, 24)
    found = fit(model_of(lambda: vrgd_tf.VRSGD(0.1, gamma=1.0), 4, layer), x, y)
    expected = fit(model_of(lambda: keras.optimizers.SGD(0.1), 1, layer), x, y)
    harness.assert_weights_close(found.get_weights(), expected.get_weights(), 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["LAMB", "VRAdam"])
def test_weights_of_16_bits_move(name, dtype, rng):
    """keras#21238: constants such as 0.999 round to 1 in bfloat16, and stock LAMB leaves the weights where they are."""
    x, y = data(rng, 8)
    cls, arguments, rule = harness.OPTIMIZERS[name]
    model = model_of(lambda: cls(**arguments), 2, lambda: keras.layers.Dense(2, dtype=dtype, bias_initializer="ones"))
    before = [np.float32(weight) for weight in model.get_weights()]
    expected = trained_reference(weights=before, x=x, y=y, updates=1, samples=2, **(arguments | rule)).w
    step = steps(before, fit(model, x, y))
    # The weights themselves are rounded, to 1/512 of their value in bfloat16, and so are the gradients.
    harness.assert_weights_close(step, [b - e for b, e in zip(before, expected, strict=True)], 0.08)


@pytest.mark.parametrize("name", ["LAMB", "LARS", "VRLAMB", "VRLARS"])
def test_zero_weights_learn(name, rng):
    """pytorch-lamb#6: a trust ratio that is the norm of the weights keeps a layer of zeros at zero for ever."""
    x, y = data(rng, 16)
    cls, arguments, rule = harness.OPTIMIZERS[name]
    model = model_of(lambda: cls(**arguments), 2, lambda: keras.layers.Dense(2, kernel_initializer="zeros"))
    expected = trained_reference(weights=model.get_weights(), x=x, y=y, updates=2, samples=2, **(arguments | rule))
    fit(model, x, y)
    assert all(np.all(weight != 0) for weight in model.get_weights())
    harness.assert_weights_close(model.get_weights(), expected.w, 1e-5)


@pytest.mark.parametrize(
    "ours, stock",
    [
        (lambda: vrgd_tf.LARS(0.1, weight_decay=0.5), lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        (lambda: vrgd_tf.LAMB(0.1, weight_decay=0.5, epsilon=0.0), lambda: keras.optimizers.Adam(0.1, epsilon=0.0)),
    ],
    ids=["LARS", "LAMB"],
)
def test_norm_scales_and_biases_take_the_plain_step_by_default(ours, stock, rng):
    """transformers#4360, Paddle#26733: neither weight decay nor layer adaptation; no pattern of names is needed."""
    # Other than 1, at which the trust ratio of the first step of LAMB is 1 too.
    threes = keras.initializers.Constant(3)
    layers = (
        lambda: keras.layers.Dense(5, use_bias=False),
        lambda: keras.layers.BatchNormalization(gamma_initializer=threes, beta_initializer=threes),
        lambda: keras.layers.Dense(4, activation="tanh", bias_initializer=threes),
        lambda: keras.layers.LayerNormalization(gamma_initializer=threes, beta_initializer=threes),
        lambda: keras.layers.Dense(2, bias_initializer=threes),
    )
    x, y = data(rng, 8)
    found, expected = (fit(model_of(make, 2, *layers), x, y) for make in (ours, stock))
    pairs = list(zip(found.trainable_variables, expected.trainable_variables, strict=True))
    assert sum(len(variable.shape) == 1 for variable, _ in pairs) == 6
    for a, b in pairs:
        if len(a.shape) == 1:
            # Keras' Adam rounds its bias correction in float32.
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, err_msg=a.path)
        else:
            assert not np.allclose(a.numpy(), b.numpy(), rtol=1e-2), a.path


@pytest.mark.parametrize("weight_decay", [None, 0.0])
def test_weight_decay_of_zero_keeps_the_trust_ratio_of_lars(weight_decay, rng):
    """Paddle#40892: the first step is as long as learning_rate * trust_coefficient * |w|, whatever the gradient."""
    x, y = data(rng, 8)
    model = model_of(lambda: vrgd_tf.LARS(2.0, trust_coefficient=0.01, weight_decay=weight_decay), 2)
    before = model.get_weights()
    kernel_step, _ = steps(before, fit(model, x, y))
    assert norm([kernel_step]) == pytest.approx(0.02 * norm(before[:1]), rel=1e-5)


def test_nothing_is_traced_after_the_first_step(rng, monkeypatch):
    """pytorch/xla#2511: the first step of LAMB is slow where it compiles; no later one does so, at other rates neither.

    In eager mode, where every step asks for its compiled programs anew.
    """
    traces, seen = [], []

    def counted(*args, lamb=rules.lamb, **arguments):
        traces.append(args)
        return lamb(*args, **arguments)

    monkeypatch.setattr(rules, "lamb", counted)
    rate, decay = (keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5) for _ in range(2))
    # A shape that no other test has: its programs could be compiled already.
    layers = (lambda: keras.layers.Dense(7), lambda: keras.layers.Dense(2))
    model = model_of(lambda: vrgd_tf.LAMB(rate, weight_decay=decay), 2, *layers, run_eagerly=True)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(len(traces)))
    fit(model, *data(rng, 32), callbacks=[callback])
    assert seen[0] > 0 and seen == [seen[0]] * 4


# Gradient samples.


@pytest.mark.parametrize("replicas, accumulation", [(4, None), (2, 2)])
def test_variance_is_never_negative(replicas, accumulation, rng):
    """As E[g^2] - E[g]^2 it is, where samples nearly agree. Here they have ratio 1 then, whatever their offset."""
    spread = np.repeat([0.0, 1e-7, 1e-2, 1.0], 50)
    offset = 10.0 ** rng.uniform(-12, 12, spread.size)
    samples = [[np.float32(offset * (1 + spread * rng.normal(size=spread.size)))] for _ in range(4)]
    run = harness.train(
        lambda: vrgd_tf.VRSGD(1.0, gradient_accumulation_steps=accumulation), [np.zeros(200)], [samples], replicas
    )
    found = -run.weights[0][0] / np.mean(samples, axis=0, dtype=np.float64)[0]
    np.testing.assert_allclose(found, reference.ratio([sample[0] for sample in samples]), atol=1e-4)
    np.testing.assert_allclose(found[spread < 1e-6], 1, atol=1e-6)


def test_empty_replica_of_a_partial_last_batch_is_a_sample_of_zeros(rng):
    """tf#36932, and what the README says: batch with drop_remainder=True.

    Of the 6 examples of the last batch the first 3 replicas get 2 each. The zeros of the fourth enter the mean and the
    variance like those of any other sample.
    """
    x, y = data(rng, 14)
    model = model_of(lambda: vrgd_tf.VRSGD(0.5), 4)
    expected = reference.Optimizer("sgd", model.get_weights(), learning_rate=0.5)
    expected.update(samples_of(expected.w, x[:8], y[:8], 4))
    zeros = [np.zeros_like(weight) for weight in expected.w]
    expected.update([*samples_of(expected.w, x[8:], y[8:], 3), zeros])
    fit(model, x, y)
    harness.assert_weights_close(model.get_weights(), expected.w, 1e-5)
    assert int(model.optimizer.skipped_updates) == 0


@pytest.mark.parametrize(
    "ours, stock",
    [
        (lambda: vrgd_tf.VRMomentum(0.1), lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        (lambda: vrgd_tf.VRAdam(0.1), lambda: keras.optimizers.Adam(0.1)),
    ],
    ids=["VRMomentum", "VRAdam"],
)
def test_replicas_that_see_the_same_samples_take_the_plain_step(ours, stock, rng):
    """As several workers do whose input is not sharded: no variance, and the step of stock Keras on one replica."""
    x, y = data(rng, 6)
    found, expected = model_of(ours, 2), model_of(stock, 1)
    # Each batch twice, once for each replica.
    twice = [np.concatenate([np.tile(batch, (2, 1)) for batch in np.split(part, 3)]) for part in (x, y)]
    fit(found, *twice, batch_size=4)
    fit(expected, x, y, batch_size=2)
    # Keras' Adam rounds its bias correction in float32.
    harness.assert_weights_close(found.get_weights(), expected.get_weights(), 2e-5)


def test_sum_of_losses_leaves_the_ratio_as_it_is(rng):
    """Keras does not divide such a loss by the replicas: on batches of 8 the step is 8 times that of the mean loss."""
    x, y = data(rng, 24)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = model_of(lambda: vrgd_tf.VRSGD(0.5 / 8), 2, loss=loss)
    expected = trained_reference("sgd", model.get_weights(), x, y, 3, 2, learning_rate=0.5)
    fit(model, x, y)
    harness.assert_weights_close(model.get_weights(), expected.w, 1e-5)


@pytest.mark.parametrize("factor", [None, 8.0])
def test_repeated_ids_of_an_embedding_are_summed_before_they_are_squared(factor, rng):
    """tf#53160: a sparse gradient has a row for each occurrence. With loss_scale_factor, stock Keras fails on it."""
    ids = np.array([[1, 1, 4], [1, 1, 1], [1, 2, 2], [4, 1, 2]])  # two examples for each of two replicas
    y = np.float32(rng.normal(size=(4, 3, 2)))
    model = model_of(
        lambda: vrgd_tf.VRSGD(0.5, loss_scale_factor=factor), 2, lambda: keras.layers.Embedding(6, 2), inputs=3
    )
    [table] = model.get_weights()
    samples = []
    for i, target in zip(np.split(ids, 2), np.split(y, 2), strict=True):
        gradient = np.zeros_like(table, np.float64)
        np.add.at(gradient, i, 2 * (table[i] - np.float64(target)) / target.size)
        samples.append([gradient])
    expected = reference.Optimizer("sgd", [table], learning_rate=0.5)
    expected.update(samples)
    fit(model, ids, y, batch_size=4)
    harness.assert_weights_close(model.get_weights(), expected.w, 1e-6)
    np.testing.assert_array_equal(model.get_weights()[0][[0, 3, 5]], table[[0, 3, 5]])


# What Keras does. No optimizer can change it; where a later Keras does, these tests fail.


def test_train_on_batch_gives_every_replica_the_whole_batch(rng):
    """So that there is no variance, however different the examples: the step is that of stock Keras on one replica."""
    x, y = data(rng, 8)
    found = model_of(lambda: vrgd_tf.VRSGD(0.3), 4)
    expected = model_of(lambda: keras.optimizers.SGD(0.3), 1)
    for model in (found, expected):
        model.train_on_batch(x, y)
    harness.assert_weights_close(found.get_weights(), expected.get_weights(), 1e-6)


def test_keras_dropout_is_no_noise_between_replicas(rng):
    """All replicas draw one mask, so that on equal examples all samples agree, and the step is that of stock SGD.

    The random numbers of TensorFlow differ from replica to replica.
    """

    def layer():
        return keras.layers.Dropout(0.5, seed=1)

    strategy = harness.strategy_of(2)
    with strategy.scope():
        dropout = layer()
        dropout.build((None, 20))

    def draw():
        return dropout(tf.ones((1, 20)), training=True), tf.random.uniform((1, 20))

    masks, numbers = (strategy.experimental_local_results(v) for v in tf.function(strategy.run)(draw))
    np.testing.assert_array_equal(masks[0], masks[1])
    assert np.any(masks[0] == 0) and np.any(masks[0] != 0) and np.any(numbers[0] != numbers[1])

    x, y = (np.tile(part, (2, 1)) for part in data(rng, 4))
    found, expected = (
        fit(model_of(make, 2, layer, lambda: keras.layers.Dense(2)), x, y, epochs=3)
        for make in (lambda: vrgd_tf.VRSGD(0.3), lambda: keras.optimizers.SGD(0.3))
    )
    harness.assert_weights_close(found.get_weights(), expected.get_weights(), 1e-6)


@pytest.mark.parametrize("synchronized", [False, True])
def test_saved_batch_statistics_are_those_of_replica_0_unless_synchronized(synchronized, rng, tmp_path):
    """Keras' BatchNormalization; that it differs between replicas does not disturb the update of its weights."""

    def layer():
        return keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized)

    x, y = data(rng, 8)
    x[4:] += 10  # the examples of replica 1
    model = fit(model_of(lambda: vrgd_tf.VRSGD(0.1), 2, layer, lambda: keras.layers.Dense(2)), x, y)
    harness.check_replicas_agree(model.trainable_variables + model.optimizer.variables)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = model_of(lambda: vrgd_tf.VRSGD(0.1), 1, layer, lambda: keras.layers.Dense(2))
    loaded.load_weights(tmp_path / "model.weights.h5")
    seen = x if synchronized else x[:4]
    statistics = loaded.layers[0]
    np.testing.assert_allclose(statistics.moving_mean.numpy(), 0.1 * seen.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(statistics.moving_variance.numpy(), 0.9 + 0.1 * seen.var(0), rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: vrgd_tf.VRSGD(0.0, gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(0.0, gradient_accumulation_steps=2),
    ],
    ids=["ours", "stock"],
)
def test_batch_normalization_sees_the_accumulation_steps_one_by_one(optimizer, rng):
    """GradientAccumulator#6: its statistics are those of micro-batches, with our optimizers as with those of Keras."""

    def layer():
        return keras.layers.BatchNormalization(momentum=0.9)

    x, y = data(rng, 16)
    x[8:] += 10
    model = fit(model_of(optimizer, 1, layer, lambda: keras.layers.Dense(2)), x, y)
    mean, variance = np.zeros(3), np.ones(3)
    for part in np.split(x, 2):
        mean, variance = 0.9 * mean + 0.1 * part.mean(0), 0.9 * variance + 0.1 * part.var(0)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance.numpy(), variance, rtol=1e-4)


# What fails in Keras and TensorFlow themselves, with any optimizer. Where a later version trains, these tests fail, and
# the README has a limit less.

PLAIN_AND_OURS = (keras.optimizers.SGD, vrgd_tf.LAMB)


@pytest.mark.parametrize("optimizer", PLAIN_AND_OURS)
def test_first_batch_that_leaves_a_replica_empty_fails_in_keras(optimizer, rng):
    """Keras builds the model from the mean of what the replicas get, and that differs in shape. Later it does not."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same size and shape"):
        fit(model_of(optimizer, 4), *data(rng, 6))


# The others run in processes of their own: what a failure leaves behind spoils later strategies.


def failure_of_fit(strategy, optimizer, **compile_arguments):
    """What `fit` says when it fails; "" if it trains."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer=optimizer(), loss="mse", **compile_arguments)
    try:
        fit(model, np.ones((16, 3)), np.ones((16, 2)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failures_when_jit_compiled():
    from tests import conftest  # noqa: F401  (sets the logical devices)

    return [failure_of_fit(harness.strategy_of(2), optimizer, jit_compile=True) for optimizer in PLAIN_AND_OURS]


def failure_of_several_steps_per_execution(which):
    from tests import conftest  # noqa: F401  (sets the logical devices)

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return failure_of_fit(strategy, PLAIN_AND_OURS[which], steps_per_execution=2)


def failures_of_a_worker():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return [failure_of_fit(strategy, optimizer) for optimizer in PLAIN_AND_OURS]


def start(call, **environment):
    code = f"import json; from tests import test_public_reports as t; print(json.dumps(t.{call}))"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results_of(processes):
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_jit_compiled_fit_under_a_mirrored_strategy_fails_in_tensorflow():
    """keras#21366: XLA refuses a step that holds the variables of several devices. Keras' default leaves it off."""
    [failures] = results_of([start("failures_when_jit_compiled()")])
    for failure in failures:
        assert "Trying to access resource" in failure and "CPU:1 from device" in failure


def test_several_steps_per_execution_fail_in_tensorflow():
    """On CPUs, with the default collectives. With `ReductionToOneDevice` they train: `test_ways_of_compiling_agree`."""
    for failure in results_of([start(f"failure_of_several_steps_per_execution({i})") for i in range(2)]):
        assert "must feed a value for placeholder" in failure


def test_fit_with_two_workers_fails_in_keras():
    """keras#20585: Keras builds the model from a batch that is spread over workers. Custom loops train."""
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    cluster = {"worker": addresses}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in range(2)]
    for failures in results_of([start("failures_of_a_worker()", TF_CONFIG=task) for task in tasks]):
        for failure in failures:
            assert "PerReplica" in failure and "unsupported type" in failure
