"""All optimizers, from one table, under strategies in graph mode: parity with the float64 reference and stock Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import vrgd_tf
from tests import harness, reference

SHAPES = [(7, 5), (5,), (3, 2, 4), ()]
# replicas, accumulation steps
PLACES = {"4 replicas": (4, None), "2 replicas x 3 steps": (2, 3), "6 steps": (1, 6)}


def values(rng):
    return [np.float32(rng.normal(size=shape)) for shape in SHAPES]


def reference_weights(name, start, samples, **changes):
    _, arguments, rule = harness.OPTIMIZERS[name]
    own = {k: v for k, v in arguments.items() if k != "jit_compile_update"}
    oracle = reference.Optimizer(values=start, **(own | rule | changes))
    return [[w.copy() for w in oracle.update(update)] for update in samples]


@pytest.mark.parametrize("jit", [True, False], ids=["xla", "ops"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_six_updates_equal_the_float64_reference(name, place, jit, rng):
    replicas, steps = PLACES[place]
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 6, replicas * (steps or 1), SHAPES)
    run = harness.train(
        lambda: cls(gradient_accumulation_steps=steps, jit_compile_update=jit, **arguments), start, samples, replicas
    )
    for found, expected in zip(run.weights, reference_weights(name, start, samples), strict=True):
        harness.assert_weights_close(found, expected, 1e-5)


@pytest.mark.parametrize("merge_call", [True, False], ids=["merge call", "no merge call"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_without_merge_call_and_eagerly(name, steps, merge_call, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 2, 2 * (steps or 1), SHAPES)
    run = harness.train(
        lambda: cls(gradient_accumulation_steps=steps, **arguments),
        start,
        samples,
        replicas=2,
        merge_call=merge_call,
        run_eagerly=merge_call,
    )
    harness.assert_weights_close(run.weights[-1], reference_weights(name, start, samples)[-1], 1e-5)


# Keras computes 1 - beta_2^t in float32, where it is off by 1e-5 at the first steps; ours is not.
KERAS_ADAM_ROUNDING = 2e-5

STOCK = {
    "VRSGD": lambda: keras.optimizers.SGD(0.05),
    "VRMomentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "VRAdam": lambda: keras.optimizers.AdamW(0.05, amsgrad=True, weight_decay=0.1),
    "VRLARS": lambda: vrgd_tf.LARS(5.0, weight_decay=0.1),
    "VRLAMB": lambda: vrgd_tf.LAMB(0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", STOCK)
def test_gamma_1_is_the_plain_optimizer(name, replicas, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 4, replicas, SHAPES)
    ours = harness.train(lambda: cls(gamma=1.0, **arguments), start, samples, replicas)
    stock = harness.train(STOCK[name], start, samples, replicas)
    for a, b in zip(ours.weights, stock.weights, strict=True):
        harness.assert_weights_close(a, b, KERAS_ADAM_ROUNDING if name == "VRAdam" else 1e-6)


def test_gamma_1_is_adam_without_decay(rng):
    start, samples = values(rng), harness.make_samples(rng, 4, 2, SHAPES)
    ours = harness.train(lambda: vrgd_tf.VRAdam(0.05, gamma=1.0), start, samples, 2)
    stock = harness.train(lambda: keras.optimizers.Adam(0.05), start, samples, 2)
    harness.assert_weights_close(ours.weights[-1], stock.weights[-1], KERAS_ADAM_ROUNDING)


def test_lamb_without_decay_is_keras_lamb(rng):
    start, samples = values(rng)[:1], harness.make_samples(rng, 4, 2, SHAPES[:1])
    ours = harness.train(lambda: vrgd_tf.LAMB(0.05, epsilon=1e-7), start, samples, 2)
    stock = harness.train(lambda: keras.optimizers.Lamb(0.05, epsilon=1e-7), start, samples, 2)
    harness.assert_weights_close(ours.weights[-1], stock.weights[-1], 1e-6)


def test_sgd_is_lars_without_adaptation(rng):
    start, samples = values(rng), harness.make_samples(rng, 4, 2, SHAPES)
    ours = harness.train(lambda: vrgd_tf.LARS(0.05, exclude_from_layer_adaptation=["variable"]), start, samples, 2)
    stock = harness.train(lambda: keras.optimizers.SGD(0.05, momentum=0.9), start, samples, 2)
    harness.assert_weights_close(ours.weights[-1], stock.weights[-1], 1e-6)


def test_adam_is_lamb_without_adaptation(rng):
    start, samples = values(rng), harness.make_samples(rng, 1, 2, SHAPES)
    ours = harness.train(
        lambda: vrgd_tf.LAMB(0.05, epsilon=0.0, exclude_from_layer_adaptation=["."]), start, samples, 2
    )
    stock = harness.train(lambda: keras.optimizers.Adam(0.05, epsilon=0.0), start, samples, 2)
    harness.assert_weights_close(ours.weights[-1], stock.weights[-1], KERAS_ADAM_ROUNDING)


def test_golden_value_of_lamb():
    # w 2, g 1: u = 1 + 0.5 * 2 = 2, trust ratio 1, w <- 2 - 0.1 * 2.
    run = harness.train(
        lambda: vrgd_tf.LAMB(0.1, weight_decay=0.5, exclude_from_weight_decay=[], exclude_from_layer_adaptation=[]),
        [np.float32(2)],
        [[[np.float32(1)]]],
    )
    assert run.weights[0][0] == pytest.approx(1.8, abs=1e-6)


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_replicas_and_accumulation_steps_give_the_same_update(name, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    runs = [
        harness.train(lambda steps=steps: cls(gradient_accumulation_steps=steps, **arguments), start, samples, replicas)
        for replicas, steps in [(4, None), (2, 2), (1, 4)]
    ]
    for run in runs[1:]:
        harness.assert_weights_close(run.weights[-1], runs[0].weights[-1], 1e-5)


@pytest.mark.parametrize("name", ["VRSGD", "VRLARS"])
@pytest.mark.parametrize("exponent", [-25, -12, 12, 25])
def test_gradients_of_any_scale(name, exponent, rng):
    # The rules of Adam and LAMB square the gradient in a float32 slot, as stock Keras does; these two need not.
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 3, 4, SHAPES, scale=10.0**exponent)
    run = harness.train(lambda: cls(**arguments), start, samples, 4)
    harness.assert_weights_close(run.weights[-1], reference_weights(name, start, samples)[-1], 1e-5)


@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB"])
@pytest.mark.parametrize("exponent", [-12, 12])
def test_gradients_of_wide_scales_with_a_second_moment(name, exponent, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 3, 4, SHAPES, scale=10.0**exponent)
    run = harness.train(lambda: cls(**arguments), start, samples, 4)
    harness.assert_weights_close(run.weights[-1], reference_weights(name, start, samples)[-1], 1e-5)


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_near_agreement_dead_weights_and_elements_without_variance(name, place, rng):
    replicas, steps = PLACES[place]
    k = replicas * (steps or 1)
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = values(rng)
    samples = harness.make_samples(rng, 3, k, SHAPES)
    for update in samples:
        near = rng.normal(size=(7, 5))
        for sample in update:
            sample[0] = np.float32(near * (1 + 1e-3 * rng.normal(size=near.shape)))  # std/mean 1e-3
            sample[0][0] = 0  # dead
            sample[1][2] = 0.25  # the same everywhere
            sample[2][...] = 0  # a whole dead layer
    run = harness.train(lambda: cls(gradient_accumulation_steps=steps, **arguments), start, samples, replicas)
    for found, expected in zip(run.weights, reference_weights(name, start, samples), strict=True):
        harness.assert_weights_close(found, expected, 1e-4)


@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_mean_gradient_is_that_of_the_whole_batch(name, rng):
    """1, 2 and 4 replicas, a real loss: with gamma 1 all take the step of one replica on the whole batch."""
    cls, arguments, _ = harness.OPTIMIZERS[name]
    if name.startswith("VR"):
        arguments = arguments | {"gamma": 1.0}
    x, y = np.float32(rng.normal(size=(16, 6))), np.float32(rng.normal(size=(16, 3)))
    found = []
    for replicas in (1, 2, 4):
        # One replica accumulates, since it has no variance otherwise.
        steps = 2 if replicas == 1 else None
        keras.utils.set_random_seed(1)
        with harness.strategy_of(replicas).scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile(optimizer=cls(gradient_accumulation_steps=steps, **arguments), loss="mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16 // (steps or 1), drop_remainder=True)
        model.fit(data, epochs=3, verbose=0)
        found.append(model.get_weights())
    for weights in found[1:]:
        harness.assert_weights_close(weights, found[0], 1e-5)


@pytest.mark.parametrize("clipping", [{"clipvalue": 0.1}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["VRSGD", "VRLAMB", "LARS"])
def test_clipping_is_of_the_mean_gradient_and_the_ratio_of_unclipped_samples(name, clipping, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    run = harness.train(lambda: cls(**arguments, **clipping), start, samples, 4)
    expected = reference_weights(name, start, samples, **clipping)
    harness.assert_weights_close(run.weights[-1], expected[-1], 1e-5)


@pytest.mark.parametrize("frequency", [None, 2])
@pytest.mark.parametrize("steps", [None, 2])
def test_average_of_the_weights(frequency, steps, rng):
    cls, arguments, _ = harness.OPTIMIZERS["VRMomentum"]
    ema = dict(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=frequency)
    start, samples = values(rng), harness.make_samples(rng, 5, 2 * (steps or 1), SHAPES)
    run = harness.train(lambda: cls(gradient_accumulation_steps=steps, **arguments, **ema), start, samples, 2)
    oracle = reference.Optimizer(values=start, **(arguments | harness.OPTIMIZERS["VRMomentum"][2] | ema))
    for update in samples:
        oracle.update(update)
    harness.assert_weights_close(run.weights[-1], oracle.w, 1e-5)
    run.optimizer.finalize_variable_values(run.variables)
    harness.assert_weights_close([variable.numpy() for variable in run.variables], oracle.average, 1e-5)


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_ratio_max_and_other_gammas(name, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    run = harness.train(lambda: cls(gamma=0.3, ratio_max=10, **arguments), start, samples, 4)
    expected = reference_weights(name, start, samples, gamma=0.3, ratio_max=10)
    harness.assert_weights_close(run.weights[-1], expected[-1], 1e-5)


@pytest.mark.parametrize("steps", [None, 2, 4])
@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_excluded_variables_take_the_plain_step(name, steps, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    run = harness.train(
        lambda: cls(exclude_from_gsnr=["variable_0"], gradient_accumulation_steps=steps, **arguments),
        start,
        samples,
        4 // (steps or 1),
    )
    plain = reference_weights(name, start, samples, vr=False)[-1]
    scaled = reference_weights(name, start, samples)[-1]
    harness.assert_weights_close(run.weights[-1], [plain[0], *scaled[1:]], 1e-5)
    assert not any("variable_0_ratio_average" in v.path for v in run.optimizer.variables)


@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB"])
@pytest.mark.parametrize("second_moment", ["scaled_gradient", "gradient"])
def test_second_moment(name, second_moment, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    arguments = arguments | {"second_moment": second_moment}
    start, samples = values(rng), harness.make_samples(rng, 4, 4, SHAPES)
    run = harness.train(lambda: cls(**arguments), start, samples, 4)
    expected = reference_weights(name, start, samples, second_moment=second_moment)
    harness.assert_weights_close(run.weights[-1], expected[-1], 1e-5)


def test_variance_in_bfloat16_is_close(rng):
    cls, arguments, _ = harness.OPTIMIZERS["VRSGD"]
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    run = harness.train(lambda: cls(variance_dtype="bfloat16", **arguments), start, samples, 4)
    expected = reference_weights("VRSGD", start, samples)
    harness.assert_weights_close(run.weights[-1], expected[-1], 1e-2)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_non_finite_sample_leaves_everything_as_it_is(name, bad, steps, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start, samples = values(rng), harness.make_samples(rng, 3, 2 * (steps or 1), SHAPES)
    good, poisoned = samples[:2], samples[2]
    poisoned[0][0][1, 1] = bad
    run = harness.train(lambda: cls(gradient_accumulation_steps=steps, **arguments), start, good, 2)
    variables = [v for v in run.optimizer.variables if v.synchronization != "on_read" and v.ndim]
    before = [v.numpy() for v in run.variables + variables]
    step = harness.make_step(run.strategy, run.optimizer, run.variables, 2)
    for at in range(0, len(poisoned), 2):
        step([tf.constant(np.stack(column)) for column in zip(*poisoned[at : at + 2])])
    for variable, value in zip(run.variables + variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(run.optimizer.skipped_updates) == 1
    # The next update is the one that would have followed the good ones.
    for at in range(0, len(samples[0]), 2):
        step([tf.constant(np.stack(column)) for column in zip(*samples[0][at : at + 2])])
    expected = reference_weights(name, start, [*good, samples[0]])[-1]
    harness.assert_weights_close([v.numpy() for v in run.variables], expected, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_variables_move_and_slots_are_float32(dtype, rng):
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    samples = [[[np.asarray(tf.cast(g, dtype), np.float32) for g in sample] for sample in update] for update in samples]
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    run = harness.train(lambda: cls(**arguments), start, samples, 4, dtype=dtype)
    expected = reference_weights("VRLAMB", start, samples)
    harness.assert_weights_close([w.astype("float32") for w in run.weights[-1]], expected[-1], 0.03)
    assert {v.dtype for v in run.optimizer.variables} <= {"float32", "int64"}


def test_float64_variables_keep_their_precision(rng):
    start, samples = values(rng), harness.make_samples(rng, 3, 4, SHAPES)
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    run = harness.train(lambda: cls(**arguments), start, samples, 4, dtype="float64")
    harness.assert_weights_close(run.weights[-1], reference_weights("VRLAMB", start, samples)[-1], 1e-7)
