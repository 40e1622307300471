"""What models bring: layers that are frozen, odd shapes, constraints, averages of weights, 16-bit policies."""

import functools

import keras
import numpy as np
import pytest

import vrgd_tf
from tests import harness, reference

REPLICAS = 4


def x_and_y(size=32):
    x = np.float32(np.random.default_rng(3).normal(size=(size, 3)))
    return x, x[:, :1] ** 2


def make(name="VRAdam", **changes):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    return cls(**(arguments | changes))


def model_of(optimizer, replicas=REPLICAS, **layer_arguments):
    keras.utils.set_random_seed(1)
    with harness.strategy_of(replicas).scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh", name="hidden", **layer_arguments),
                keras.layers.Dense(1, name="head"),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse")
    return model


def train(model, steps=3, batch=8):
    harness.train_on_batches(model, *x_and_y(batch * steps), batch)
    return model


# Layers that do not learn.


@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_frozen_layer_stays_and_has_no_slots(name):
    model = model_of(make(name))
    model.get_layer("hidden").trainable = False
    model.compile(optimizer=make(name), loss="mse")
    frozen, head = model.get_layer("hidden").get_weights(), model.get_layer("head").get_weights()
    train(model)
    for a, b in zip(model.get_layer("hidden").get_weights(), frozen, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.all(a != b) for a, b in zip(model.get_layer("head").get_weights(), head, strict=True))
    assert not any("hidden" in variable.path for variable in model.optimizer.variables)


@pytest.mark.parametrize("steps", [None, 2])
def test_layer_frozen_while_training_keeps_its_slots_for_later(steps):
    """The same optimizer, compiled again: as in Keras it goes on with fewer variables, and back with all of them."""
    model = train(model_of(make(gradient_accumulation_steps=steps)), 4)
    optimizer, hidden = model.optimizer, model.get_layer("hidden")
    slots = [v.numpy() for v in optimizer.variables if "hidden" in v.path and v.synchronization != "on_read"]
    hidden.trainable = False
    model.compile(optimizer=optimizer, loss="mse")
    kept, head = hidden.get_weights(), model.get_layer("head").get_weights()
    train(model, 4)
    for a, b in zip(hidden.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(
        [v.numpy() for v in optimizer.variables if "hidden" in v.path and v.synchronization != "on_read"], slots
    ):
        np.testing.assert_array_equal(a, b)
    assert all(np.all(a != b) for a, b in zip(model.get_layer("head").get_weights(), head, strict=True))
    hidden.trainable = True
    model.compile(optimizer=optimizer, loss="mse")
    train(model, 4)
    assert all(np.all(a != b) for a, b in zip(hidden.get_weights(), kept, strict=True))


def test_layer_unfrozen_after_the_optimizer_was_built_is_refused_with_a_reason():
    model = model_of(make())
    model.get_layer("hidden").trainable = False
    model.compile(optimizer=make(), loss="mse")
    train(model)
    optimizer, before = model.optimizer, model.get_weights()
    model.get_layer("hidden").trainable = True
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match=r"Unknown variables: .*kernel, .*bias\. "):
        train(model)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_variable_that_the_loss_does_not_reach_stays_and_is_named():
    class Idle(keras.layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(2,), initializer="ones", name="idle")

        def call(self, inputs):
            return inputs

    with harness.strategy_of(REPLICAS).scope():
        model = keras.Sequential([keras.Input((3,)), Idle(), keras.layers.Dense(1)])
        model.compile(optimizer=make(), loss="mse")
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables.*idle"):
        train(model)
    np.testing.assert_array_equal(model.layers[0].idle.numpy(), [1, 1])


def test_model_without_trainable_weights_trains_nothing_as_in_keras():
    for optimizer in (make(), keras.optimizers.Adam()):
        with harness.strategy_of(REPLICAS).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, trainable=False)])
            model.compile(optimizer=optimizer, loss="mse")
        before = model.get_weights()
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            train(model)
        np.testing.assert_array_equal(model.get_weights()[0], before[0])


# Odd shapes.

ODD_SHAPES = [(), (1,), (0,), (3, 0), (1, 1), (2, 1, 3)]


@pytest.mark.parametrize("replicas, steps", [(4, None), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_scalars_and_tensors_without_elements(name, replicas, steps, rng):
    start = [np.float32(rng.normal(size=shape)) for shape in ODD_SHAPES]
    samples = harness.make_samples(rng, 3, 4, ODD_SHAPES)
    cls, arguments, rule = harness.OPTIMIZERS[name]
    arguments = arguments | {"global_clipnorm": 0.5}
    run = harness.train(lambda: cls(**arguments, gradient_accumulation_steps=steps), start, samples, replicas)
    oracle = reference.Optimizer(values=start, **(arguments | rule))
    for update in samples:
        oracle.update(update)
    harness.assert_weights_close(run.weights[-1], oracle.w, 1e-5)
    assert [weight.shape for weight in run.weights[-1]] == ODD_SHAPES


# Stock Keras on one replica and the whole batch is the oracle for ours with gamma 1 on four, and micro-batches.


@functools.cache
def keras_divides_by_examples():
    """Whether the loss of an activity regularizer is a mean over examples: in newer versions of Keras it is."""
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer=keras.regularizers.L1(1.0))
    layer(np.ones((2, 1), "float32"))
    return float(layer.losses[0]) < 1.5


def per_example(x):
    """An activity regularizer that is a mean over examples in every version of Keras."""
    loss = 0.1 * keras.ops.sum(keras.ops.abs(x))
    return loss if keras_divides_by_examples() else loss / x.shape[0]


LAYER_ARGUMENTS = {
    "constraint": dict(kernel_constraint=keras.constraints.UnitNorm(), bias_constraint=keras.constraints.NonNeg()),
    "regularizer": dict(kernel_regularizer=keras.regularizers.L2(0.1), activity_regularizer=per_example),
}


@pytest.mark.parametrize("replicas, steps", [(REPLICAS, None), (REPLICAS, 2), (1, 2)])
@pytest.mark.parametrize("layer_arguments", LAYER_ARGUMENTS.values(), ids=LAYER_ARGUMENTS)
def test_constraints_and_regularizers(layer_arguments, replicas, steps):
    keras_divides_by_examples()  # Not to be found out in a step that is being traced.
    stock = model_of(keras.optimizers.SGD(0.05, momentum=0.9), replicas=1, **layer_arguments)
    ours = vrgd_tf.VRMomentum(0.05, gamma=1.0, gradient_accumulation_steps=steps)
    ours = model_of(ours, replicas, **layer_arguments)
    train(stock, steps=3, batch=8 * (steps or 1))
    train(ours, steps=3 * (steps or 1))
    harness.assert_weights_close(ours.get_weights(), stock.get_weights(), 1e-5)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("frequency", [None, 2])
def test_average_of_weights_in_fit(frequency, steps):
    """fit puts the averages into the model when it ends; Keras' own fails under MirroredStrategy."""
    averages = dict(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=frequency, weight_decay=0.1)
    stock = model_of(keras.optimizers.SGD(0.05, **averages), replicas=1)
    ours = model_of(vrgd_tf.VRSGD(0.05, gamma=1.0, gradient_accumulation_steps=steps, **averages))
    for model, batch in ((stock, 16), (ours, 16 // (steps or 1))):
        model.fit(*x_and_y(64), batch_size=batch, epochs=2, shuffle=False, verbose=0)
    harness.assert_weights_close(ours.get_weights(), stock.get_weights(), 1e-5)


# Weight decay.


@pytest.mark.parametrize("kind", ["schedule", "callable"])
@pytest.mark.parametrize("replicas, steps", [(4, None), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", ["VRSGD", "VRAdam", "VRLARS", "VRLAMB"])
def test_weight_decay_on_a_schedule_counts_updates(name, replicas, steps, kind, rng):
    start = [np.float32(rng.normal(size=(4, 3)))]
    samples = harness.make_samples(rng, 4, 4, [(4, 3)])
    cls, arguments, rule = harness.OPTIMIZERS[name]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], [0.4, 0.2, 0.0, 0.3])
    decays = [0.4, 0.2, 0.0, 0.3]
    if kind == "callable":
        schedule, decays = (lambda: 0.25), [0.25] * 4
    arguments = arguments | {"weight_decay": schedule}
    run = harness.train(lambda: cls(**arguments, gradient_accumulation_steps=steps), start, samples, replicas)
    oracle = reference.Optimizer(values=start, **(arguments | rule))
    for update, decay in zip(samples, decays, strict=True):
        oracle.weight_decay = decay
        oracle.update(update)
    harness.assert_weights_close(run.weights[-1], oracle.w, 1e-5)


def test_weight_decay_schedule_round_trip():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for cls in (vrgd_tf.VRLAMB, vrgd_tf.VRAdam):
        optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(cls(weight_decay=schedule)))
        assert optimizer.weight_decay.get_config() == schedule.get_config()


# 16 bits.


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_16_bit_policies_learn(policy, steps):
    """The weights follow those of the float32 model.

    Where they are of 16 bits themselves, the steps are large enough for the spacing of bfloat16, 0.004 at 1.
    """
    rate = 2e-3 if policy.startswith("mixed") else 2e-2
    arguments = dict(learning_rate=rate, gradient_accumulation_steps=steps)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = vrgd_tf.VRAdam(**arguments)
        if policy == "mixed_float16":  # From its default scale, the first steps would be skipped.
            optimizer = vrgd_tf.LossScaleOptimizer(optimizer, initial_scale=64.0)
        model = model_of(optimizer)
        start = [np.float32(weight) for weight in model.get_weights()]
        train(model, 40)
    finally:
        keras.config.set_dtype_policy(before)
    expected = model_of(vrgd_tf.VRAdam(**arguments))
    expected.set_weights(start)
    train(expected, 40)
    assert int(model.optimizer.skipped_updates) == 0
    for a, b, w in zip(model.get_weights(), expected.get_weights(), start, strict=True):
        moved, meant = np.float32(a) - w, b - w
        assert np.linalg.norm(moved - meant) < 0.35 * np.linalg.norm(meant), (policy, moved, meant)
    assert all(v.dtype in ("float32", "int32", "int64") for v in model.optimizer.variables)


# Steps that are not finite, in a train step of Keras.


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["VRLAMB", "VRMomentum", "LARS"])
def test_bad_example_on_one_replica_costs_one_update(name, bad, steps):
    x, y = x_and_y(32)
    x[5] = bad  # the third of four replicas, in the first batch of 8
    model = model_of(make(name, gradient_accumulation_steps=steps, use_ema=True))
    before = model.get_weights()
    harness.train_on_batches(model, x[: 8 * (steps or 1)], y[: 8 * (steps or 1)], 8)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(model.optimizer.skipped_updates) == int(model.optimizer.iterations) == 1
    harness.train_on_batches(model, x[16:], y[16:], 8)
    expected = model_of(make(name, gradient_accumulation_steps=steps, use_ema=True))
    harness.train_on_batches(expected, x[16:], y[16:], 8)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(model.optimizer.skipped_updates) == 1


def test_clipping_of_a_step_that_is_not_finite_changes_nothing(rng):
    """Clipping by value would make an infinity finite; the check comes first."""
    samples = harness.make_samples(rng, 1, 4, [(3,)])
    samples[0][1][0][2] = np.inf
    for clipping in ({"clipvalue": 0.1}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}):
        run = harness.train(lambda clipping=clipping: make(**clipping), [np.ones(3)], samples, 4)
        np.testing.assert_array_equal(run.weights[0][0], np.ones(3))
        assert int(run.optimizer.skipped_updates) == 1


def test_without_skipping_a_bad_sample_reaches_the_weights(rng):
    samples = harness.make_samples(rng, 1, 4, [(3,)])
    samples[0][1][0][2] = np.nan
    run = harness.train(lambda: make(skip_nonfinite=False), [np.ones(3)], samples, 4)
    assert np.isnan(run.weights[0][0][2]) and int(run.optimizer.skipped_updates) == 0
