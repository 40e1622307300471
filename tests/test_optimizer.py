"""The shell: arguments, configuration, saving, exclusions, and what it asks of its samples."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import vrgd_tf
from tests import harness

CLASSES = [getattr(vrgd_tf, name) for name in ("VRSGD", "VRMomentum", "VRAdam", "VRLARS", "VRLAMB", "LARS", "LAMB")]
VR_CLASSES = CLASSES[:5]


def model_of(optimizer, width=4):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(width, name="hidden"), keras.layers.Dense(1, name="head")]
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


def data(rng, size=32):
    x = np.float32(rng.normal(size=(size, 3)))
    return x, np.float32(x.sum(1, keepdims=True))


# Arguments.

BAD_FOR_ALL = [
    {"learning_rate": -0.1},
    {"learning_rate": float("nan")},
    {"weight_decay": -1.0},
    {"clipnorm": -1.0},
    {"clipvalue": 0.0},
    {"global_clipnorm": float("inf")},
    {"clipnorm": 1.0, "clipvalue": 1.0},
    {"loss_scale_factor": 0.0},
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 2.5},
    {"gradient_accumulation_steps": True},
    {"use_ema": True, "ema_momentum": 1.5},
    {"exclude_from_weight_decay": "bias"},
    {"exclude_from_weight_decay": ["("]},
    {"exclude_from_weight_decay": [1]},
    {"skip_nonfinite": "yes"},
    {"jit_compile_update": "always"},
    {"no_such_argument": 1},
]
BAD_FOR_VR = [
    {"gamma": 0.0},
    {"gamma": 1.1},
    {"gamma": "0.1"},
    {"gamma": float("nan")},
    {"ratio_max": 0.9},
    {"ratio_max": float("inf")},
    {"beta_3": 1.0},
    {"beta_3": -0.1},
    {"exclude_from_gsnr": "bias"},
    {"variance_dtype": "float16"},
]
BAD_MOMENTUM = [{"momentum": 1.0}, {"momentum": -0.1}]
BAD_MOMENTS = [{"beta_1": 1.0}, {"beta_1": -0.1}, {"beta_2": 1.0}, {"beta_2": 1.5}, {"epsilon": -1e-8}]
BAD = {
    "VRSGD": BAD_FOR_ALL + BAD_FOR_VR + BAD_MOMENTUM,
    "VRMomentum": BAD_FOR_ALL + BAD_FOR_VR + BAD_MOMENTUM,
    "VRAdam": BAD_FOR_ALL + BAD_FOR_VR + BAD_MOMENTS + [{"second_moment": "variance"}],
    "VRLARS": BAD_FOR_ALL
    + BAD_FOR_VR
    + BAD_MOMENTUM
    + [{"trust_coefficient": -1.0}, {"exclude_from_layer_adaptation": "bias"}],
    "VRLAMB": BAD_FOR_ALL + BAD_FOR_VR + BAD_MOMENTS + [{"second_moment": "variance"}],
    "LARS": BAD_FOR_ALL + BAD_MOMENTUM + [{"gamma": 0.1}, {"exclude_from_layer_adaptation": ["["]}],
    "LAMB": BAD_FOR_ALL + BAD_MOMENTS + [{"gamma": 0.1}, {"exclude_from_layer_adaptation": "bias"}],
}


@pytest.mark.parametrize("cls, arguments", [(name, bad) for name in BAD for bad in BAD[name]], ids=str)
def test_bad_argument_says_what_was_received(cls, arguments):
    with pytest.raises(ValueError) as error:
        getattr(vrgd_tf, cls)(**arguments)
    name, value = list(arguments.items())[-1]
    message = str(error.value)
    assert name in message
    assert str(value[0] if isinstance(value, list) else value) in message


@pytest.mark.parametrize("cls", CLASSES)
def test_limits_of_the_ranges_are_allowed(cls):
    arguments = {"learning_rate": 0.0, "weight_decay": 0.0, "gradient_accumulation_steps": 2}
    if cls in VR_CLASSES:
        arguments |= {"gamma": 1, "ratio_max": 1, "beta_3": 0.0}
    cls(**arguments)


def test_families():
    assert issubclass(vrgd_tf.VRSGD, keras.optimizers.SGD)
    assert issubclass(vrgd_tf.VRMomentum, keras.optimizers.SGD)
    assert issubclass(vrgd_tf.VRAdam, keras.optimizers.Adam)
    assert all(issubclass(cls, keras.optimizers.Optimizer) for cls in CLASSES)


def test_positional_arguments_are_those_of_keras():
    sgd = vrgd_tf.VRSGD(0.3, 0.8, True)
    assert (float(sgd.learning_rate), sgd.momentum, sgd.nesterov) == (pytest.approx(0.3), 0.8, True)
    adam = vrgd_tf.VRAdam(0.3, 0.8, 0.7, 1e-3, True)
    assert (adam.beta_1, adam.beta_2, adam.epsilon, adam.amsgrad) == (0.8, 0.7, 1e-3, True)


@pytest.mark.parametrize("cls", CLASSES)
def test_docstring_names_every_argument(cls):
    documented = cls.__doc__
    assert "{" not in documented
    for argument in cls().get_config():
        assert argument in documented, argument


# Samples.


@pytest.mark.parametrize("cls", VR_CLASSES)
def test_one_sample_is_refused_at_the_first_update_and_not_before(cls, rng):
    model = model_of(cls())
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"2 or more replicas, or set gradient_accumulation_steps"):
        model.fit(*data(rng), verbose=0)
    for variable, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("cls", [vrgd_tf.LARS, vrgd_tf.LAMB])
def test_plain_optimizers_need_one_sample(cls, rng):
    model_of(cls()).fit(*data(rng), verbose=0)


@pytest.mark.parametrize("steps, warned", [(2, 1), (3, 1), (4, 0)])
def test_few_samples_warn_once(steps, warned, rng):
    model = model_of(vrgd_tf.VRSGD(gradient_accumulation_steps=steps))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data(rng), batch_size=8, epochs=2, verbose=0)
        model.make_train_function(force=True)
        model.fit(*data(rng), batch_size=8, verbose=0)
    assert len([w for w in caught if "gradient samples in each update" in str(w.message)]) == warned


@pytest.mark.parametrize(
    "strategy",
    [tf.distribute.experimental.CentralStorageStrategy],
)
def test_asynchronous_strategies_are_refused(strategy):
    with strategy().scope(), pytest.raises(ValueError, match="CentralStorageStrategy") as error:
        vrgd_tf.VRSGD()
    assert "MirroredStrategy" in str(error.value)


def test_asynchronous_strategy_is_refused_when_it_holds_the_variables():
    optimizer = vrgd_tf.VRSGD()
    with tf.distribute.experimental.CentralStorageStrategy().scope():
        variables = harness.make_variables([np.ones(3)])
        with pytest.raises(ValueError, match="CentralStorageStrategy"):
            optimizer.build(variables)


def test_apply_in_cross_replica_context_is_refused(rng):
    strategy = harness.strategy_of(2)
    with strategy.scope():
        variables = harness.make_variables([np.ones(3)])
        optimizer = vrgd_tf.VRSGD()
        with pytest.raises(ValueError, match=r"strategy\.run"):
            optimizer.apply([tf.ones(3)], variables)


def test_gradients_that_do_not_fit_the_variables():
    optimizer = vrgd_tf.LAMB()
    variables = harness.make_variables([np.ones(3), np.ones(2)])
    with pytest.raises(ValueError, match="optimizer that is built"):
        optimizer.apply([tf.ones(3)])
    with pytest.raises(ValueError, match="1 gradients for 2 variables"):
        optimizer.apply([tf.ones(3)], variables)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="Unknown variables: "):
        optimizer.apply([tf.ones(3)], harness.make_variables([np.ones(3)]))
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply([None, None], variables)
    optimizer.apply([])
    assert int(optimizer.iterations) == 0


def test_variable_without_gradient_stays(rng):
    variables = harness.make_variables([np.ones(3), np.ones(2)])
    optimizer = vrgd_tf.LAMB()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.ones(3), None], variables)
    assert variables[0].numpy()[0] != 1
    np.testing.assert_array_equal(variables[1].numpy(), np.ones(2))


# Exclusions.


def excluded(optimizer, question):
    model = model_of(optimizer)
    return {v.path.split("/", 1)[1] for v in model.trainable_variables if not question(optimizer)(v)}


ALL = {"hidden/kernel", "hidden/bias", "head/kernel", "head/bias"}
BIASES = {"hidden/bias", "head/bias"}


@pytest.mark.parametrize(
    "patterns, expected", [(None, set()), ([], set()), (["bias$", "head"], ALL - {"hidden/kernel"})]
)
def test_exclude_from_gsnr(patterns, expected):
    optimizer = vrgd_tf.VRSGD(exclude_from_gsnr=patterns)
    assert excluded(optimizer, lambda o: o._uses_gsnr) == {f"{e}" for e in expected}


@pytest.mark.parametrize("patterns, expected", [(None, BIASES), ([], set()), (["kernel"], ALL - BIASES)])
def test_exclusions_of_layer_adaptive_optimizers(patterns, expected):
    for cls in (vrgd_tf.LARS, vrgd_tf.VRLAMB):
        optimizer = cls(weight_decay=0.1, exclude_from_weight_decay=patterns, exclude_from_layer_adaptation=patterns)
        assert excluded(optimizer, lambda o: o._adapts) == expected
        assert excluded(optimizer, lambda o: o._decays) == expected


@pytest.mark.parametrize("patterns, expected", [(None, set()), ([], set()), (["bias"], BIASES)])
def test_exclusions_of_the_others(patterns, expected):
    optimizer = vrgd_tf.VRAdam(weight_decay=0.1, exclude_from_weight_decay=patterns)
    assert excluded(optimizer, lambda o: o._decays) == expected


def test_method_of_keras_excludes_variables_and_names_and_is_saved():
    model = model_of("sgd")
    optimizer = vrgd_tf.VRAdam(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=model.layers[0].trainable_variables[:1], var_names=["bias"])
    for o in (optimizer, vrgd_tf.VRAdam.from_config(optimizer.get_config())):
        decays = {v.path.split("/", 1)[1] for v in model.trainable_variables if o._decays(v)}
        assert decays == {"head/kernel"}
    # A name is searched in the variable's own name, as in Keras, not in its layer's.
    optimizer.exclude_from_weight_decay(var_names=["hidden"])
    assert all(optimizer._decays(v) for v in model.trainable_variables)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="before the optimizer is built"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.parametrize(
    "argument", ["exclude_from_gsnr", "exclude_from_weight_decay", "exclude_from_layer_adaptation"]
)
def test_pattern_that_matches_nothing_warns_once_and_is_named(argument):
    model = model_of(vrgd_tf.VRLAMB(**{argument: ["bias", "gamma_typo"]}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.optimizer.build(model.trainable_variables)
        model.optimizer.build(model.trainable_variables)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "gamma_typo" in messages[0] and argument in messages[0]


# Configuration and saving.

CONFIGURED = dict(
    learning_rate=0.1,
    weight_decay=0.2,
    clipnorm=3.0,
    use_ema=True,
    ema_momentum=0.5,
    ema_overwrite_frequency=3,
    gradient_accumulation_steps=4,
    skip_nonfinite=False,
    jit_compile_update=False,
    exclude_from_weight_decay=["bias"],
    name="mine",
)
CONFIGURED_VR = dict(gamma=0.3, ratio_max=2.0, beta_3=0.4, exclude_from_gsnr=["kernel"], variance_dtype="bfloat16")


@pytest.mark.parametrize("cls", CLASSES)
def test_config_round_trip(cls):
    arguments = CONFIGURED | (CONFIGURED_VR if cls in VR_CLASSES else {})
    config = cls(**arguments).get_config()
    assert {k: config[k] for k in arguments} == {
        k: pytest.approx(v) if k == "learning_rate" else v for k, v in arguments.items()
    }
    assert cls.from_config(config).get_config() == config
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(cls(**arguments)))
    assert type(restored) is cls and restored.get_config() == config


def test_schedule_round_trip():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    restored = vrgd_tf.VRLAMB.from_config(vrgd_tf.VRLAMB(schedule).get_config())
    assert restored._learning_rate.get_config() == schedule.get_config()


# Learning rates.


def test_schedule_counts_updates(rng):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
    samples = harness.make_samples(rng, 2, 4, [(3,)])
    run = harness.train(lambda: vrgd_tf.VRSGD(schedule, gradient_accumulation_steps=4), [np.ones(3)], samples)
    assert np.any(run.weights[0][0] != 1)  # the first update has rate 1, after 4 accumulation steps
    np.testing.assert_array_equal(run.weights[1][0], run.weights[0][0])
    assert int(run.optimizer.iterations) == 2


def test_callable_and_assigned_learning_rate(rng):
    samples = harness.make_samples(rng, 1, 2, [(3,)])
    run = harness.train(lambda: vrgd_tf.VRSGD(lambda: 0.5), [np.ones(3)], samples, 2)
    fixed = harness.train(lambda: vrgd_tf.VRSGD(0.5), [np.ones(3)], samples, 2)
    np.testing.assert_array_equal(run.weights[0][0], fixed.weights[0][0])
    fixed.optimizer.learning_rate = 0.0
    harness.make_step(fixed.strategy, fixed.optimizer, fixed.variables, 2)([tf.ones((2, 3))])
    np.testing.assert_array_equal(fixed.variables[0].numpy(), fixed.weights[0][0])


# State.


@pytest.mark.parametrize(
    "cls, words",
    [("VRSGD", 0), ("VRMomentum", 1), ("VRAdam", 3), ("VRLARS", 1), ("VRLAMB", 3), ("LARS", 1), ("LAMB", 2)],
)
def test_words_of_state_per_parameter(cls, words):
    variables = harness.make_variables([np.zeros((100, 10))])

    def state(**arguments):
        optimizer = getattr(vrgd_tf, cls)(**arguments)
        optimizer.build(variables)
        return sum(int(np.prod(v.shape)) for v in optimizer.variables if v.ndim) / 1000

    assert state() == words
    assert state(use_ema=True) == words + 1
    assert state(gradient_accumulation_steps=2) == words + (2 if cls.startswith("VR") else 1)
