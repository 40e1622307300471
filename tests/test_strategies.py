"""Where it runs: fit and custom loops, however they are called, and wherever the optimizer is made."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import harness


def data(rng, size=64):
    x = np.float32(rng.normal(size=(size, 6)))
    return x, np.float32(x[:, :2] ** 2)


def fitted(strategy, optimizer=None, make=None, rng=None, batch=16, **compile_arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
        model.compile(optimizer=optimizer or make(), loss="mse", metrics=["mae"], **compile_arguments)
    x, y = data(np.random.default_rng(3))
    model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return model


def make(name="VRLAMB", **changes):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    return cls(**(arguments | changes))


def assert_same_weights(found, expected, tolerance=1e-5):
    harness.assert_weights_close(found.get_weights(), expected.get_weights(), tolerance)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    "arguments",
    [{"run_eagerly": True}, {"steps_per_execution": 2}, {"steps_per_execution": 3}, {"jit_compile": False}],
    ids=str,
)
def test_ways_of_compiling_agree(arguments, steps):
    expected = fitted(harness.strategy_of(4), make=lambda: make(gradient_accumulation_steps=steps))
    found = fitted(harness.strategy_of(4), make=lambda: make(gradient_accumulation_steps=steps), **arguments)
    assert_same_weights(found, expected)
    harness.check_replicas_agree(found.variables + found.optimizer.variables)


def test_compiled_step_without_a_strategy():
    expected = fitted(harness.strategy_of(1), make=lambda: make(gradient_accumulation_steps=4))
    found = fitted(harness.strategy_of(1), make=lambda: make(gradient_accumulation_steps=4), jit_compile=True)
    assert_same_weights(found, expected)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_made_outside_the_scope(name, steps):
    expected = fitted(harness.strategy_of(4), make=lambda: make(name, gradient_accumulation_steps=steps))
    found = fitted(harness.strategy_of(4), make(name, gradient_accumulation_steps=steps))
    assert_same_weights(found, expected)
    assert int(found.optimizer.iterations) == int(expected.optimizer.iterations) == (6 if steps else 12)


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("built", ["before", "in the step"])
@pytest.mark.parametrize("merge_call", [True, False])
def test_custom_loop(place, built, merge_call, rng):
    """`build` inside or outside the scope, or not called at all."""
    strategy = harness.strategy_of(2, merge_call)
    start, samples = [np.float32(rng.normal(size=(4, 3)))], harness.make_samples(rng, 2, 2, [(4, 3)])
    expected = harness.train(make, start, samples, 2)
    optimizer = make() if place == "outside" else None
    with strategy.scope():
        optimizer = optimizer or make()
        variables = harness.make_variables(start)
    if built == "before":
        optimizer.build(variables)
    step = harness.make_step(strategy, optimizer, variables, 2)
    for update in samples:
        step([tf.constant(np.stack(column)) for column in zip(*update)])
    np.testing.assert_array_equal(variables[0].numpy(), expected.weights[-1][0])
    assert {len(v.value.values) for v in optimizer.variables} == {2}


def test_moves_out_of_a_strategy(rng):
    with harness.strategy_of(2).scope():
        optimizer = make(gradient_accumulation_steps=4, learning_rate=0.125)
    found = fitted(harness.strategy_of(1), optimizer)
    assert float(optimizer.learning_rate) == 0.125
    expected = fitted(harness.strategy_of(1), make=lambda: make(gradient_accumulation_steps=4, learning_rate=0.125))
    assert_same_weights(found, expected)


def test_one_device_strategy(rng):
    expected = fitted(harness.strategy_of(1), make=lambda: make(gradient_accumulation_steps=4))
    found = fitted(tf.distribute.OneDeviceStrategy("CPU:0"), make=lambda: make(gradient_accumulation_steps=4))
    assert_same_weights(found, expected)


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_loss_goes_down_in_fit(name):
    cls, _, _ = harness.OPTIMIZERS[name]
    rate = {"VRLARS": 1.0}.get(name, 0.02)
    with harness.strategy_of(4).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
        model.compile(optimizer=cls(learning_rate=rate), loss="mse")
    batches = tf.data.Dataset.from_tensor_slices(data(np.random.default_rng(3))).repeat().batch(32)
    history = model.fit(batches, epochs=15, steps_per_epoch=2, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


@pytest.mark.parametrize("steps", [None, 2])
def test_tf_variables_in_a_custom_loop(steps, rng):
    start, samples = [np.float32(rng.normal(size=(4, 3)))], harness.make_samples(rng, 2, 2 * (steps or 1), [(4, 3)])
    expected = harness.train(lambda: make(gradient_accumulation_steps=steps), start, samples, 2)
    strategy = harness.strategy_of(2)
    with strategy.scope():
        variables = [tf.Variable(start[0], aggregation=tf.VariableAggregation.MEAN)]
        optimizer = make(gradient_accumulation_steps=steps)
    step = harness.make_step(strategy, optimizer, variables, 2)
    for update in samples:
        for at in range(0, len(update), 2):
            step([tf.constant(np.stack(column)) for column in zip(*update[at : at + 2])])
    np.testing.assert_array_equal(variables[0].numpy(), expected.weights[-1][0])


@pytest.mark.parametrize("name", ["VRLAMB", "LAMB"])
def test_accumulation_steps_send_nothing(name, monkeypatch, rng):
    """Counted where every reduction passes: only the branch that updates has any."""
    from vrgd_tf import replicas

    strategy = harness.strategy_of(2)
    with strategy.scope():
        variables = harness.make_variables([np.ones((4, 3)), np.ones(3)])
        optimizer = make(name, gradient_accumulation_steps=3)
        optimizer.build(variables)
    reductions = []
    reduce = strategy.extended.batch_reduce_to
    monkeypatch.setattr(strategy.extended, "batch_reduce_to", lambda *a, **k: reductions.append(1) or reduce(*a, **k))
    reduce_to = strategy.extended.reduce_to
    monkeypatch.setattr(strategy.extended, "reduce_to", lambda *a, **k: reductions.append(1) or reduce_to(*a, **k))
    step = harness.make_step(strategy, optimizer, variables, 2, run_eagerly=True)
    seen = []
    for _ in range(6):
        reductions.clear()
        step([tf.ones((2, 4, 3)), tf.ones((2, 3))])
        seen.append(len(reductions))
    # Of the gradients. These replicas share memory, so that the variances need none.
    assert seen == [0, 0, 1] * 2
    assert replicas.all_reduce_sum([]) == []


def test_constraint_is_kept_and_a_skipped_step_does_not_apply_it():
    strategy = harness.strategy_of(2)
    with strategy.scope():
        layer = keras.layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm(), use_bias=False)
        layer.build((None, 4))
        optimizer = make("VRMomentum")
    start = layer.kernel.numpy()
    step = harness.make_step(strategy, optimizer, [layer.kernel], 2)
    step([tf.fill((2, 4, 3), np.nan)])
    np.testing.assert_array_equal(layer.kernel.numpy(), start)
    step([tf.random.stateless_normal((2, 4, 3), (1, 2))])
    np.testing.assert_allclose(np.linalg.norm(layer.kernel.numpy(), axis=0), 1, rtol=1e-5)
