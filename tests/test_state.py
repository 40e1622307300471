"""Saving and resuming: bit for bit where nothing changed, said aloud where something did."""

import copy
import json
import pickle
import warnings

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import harness, reference
from vrgd_tf import state

STEPS = 4  # accumulation steps, where there are any


def model_of(optimizer, width=4, replicas=4, loss="mse"):
    with harness.strategy_of(replicas).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1, name="head")]
        )
        model.compile(optimizer=optimizer, loss=loss)
    return model


def make(name="VRLAMB", steps=None, **changes):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    return cls(**(arguments | {"gradient_accumulation_steps": steps} | changes))


def fit(model, first, last):
    """Trains on the batches from `first` to `last` of one fixed sequence."""
    x = np.float32(np.random.default_rng(5).normal(size=(last * 8, 3)))[first * 8 :]
    harness.train_on_batches(model, x, x[:, :1] ** 2, 8)


def check_same_state(found, expected):
    assert len(found.optimizer.variables) == len(expected.optimizer.variables)
    pairs = list(zip(found.variables, expected.variables, strict=True))
    pairs += zip(found.optimizer.variables, expected.optimizer.variables, strict=True)
    for a, b in pairs:
        if b.synchronization != "on_read":
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=b.path)


def resume(way, model, fresh, path):
    """A model with the state of `model`: by `way`, in `fresh()` where the file does not hold the model."""
    if way == "keras file":
        model.save(path / "model.keras")
        with fresh().distribute_strategy.scope():
            return keras.models.load_model(path / "model.keras")
    loaded = fresh()
    if not way.endswith("unbuilt"):
        loaded.optimizer.build(loaded.trainable_variables)
    if way.startswith("weights"):
        model.save_weights(path / "model.weights.h5")
        loaded.load_weights(path / "model.weights.h5")
    else:
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "checkpoint")
        tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).restore(saved)
    return loaded


WAYS = ["keras file", "weights", "weights, unbuilt", "checkpoint", "checkpoint, unbuilt"]
EVERY_WAY = [("VRLAMB", way, steps) for way in WAYS for steps in (None, STEPS)]
EVERY_OPTIMIZER = [
    (name, way, steps) for name in harness.OPTIMIZERS for way, steps in (("keras file", None), ("checkpoint", STEPS))
]


@pytest.mark.parametrize("name, way, steps", dict.fromkeys(EVERY_WAY + EVERY_OPTIMIZER))
def test_resumed_run_equals_one_that_did_not_stop(name, way, steps, tmp_path):
    """With accumulation it stops in the midst of one: 6 batches are one update and 2 of the next 4 steps."""

    def fresh():
        return model_of(make(name, steps, use_ema=True, ema_overwrite_frequency=2))

    model = fresh()
    fit(model, 0, 6)
    resumed = resume(way, model, fresh, tmp_path)
    assert type(resumed.optimizer) is type(model.optimizer)
    assert int(resumed.optimizer.iterations) == int(model.optimizer.iterations) == (1 if steps else 6)
    for m in (resumed, model):
        fit(m, 6, 12)
    check_same_state(resumed, model)


@pytest.mark.parametrize("way", WAYS)
def test_resumed_run_on_one_device(way, tmp_path):
    def fresh():
        return model_of(make(steps=STEPS), replicas=1)

    model = fresh()
    fit(model, 0, 6)
    resumed = resume(way, model, fresh, tmp_path)
    for m in (resumed, model):
        fit(m, 6, 8)
    check_same_state(resumed, model)


@pytest.mark.parametrize("steps", [None, STEPS])
def test_resumes_from_keras_backup_and_restore(steps, tmp_path):
    """An epoch of 6 batches ends in the midst of an accumulation."""

    class Interrupted(Exception):
        pass

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise Interrupted

    x = np.float32(np.random.default_rng(5).normal(size=(48, 3)))

    def run(model, *callbacks):
        model.fit(x, x[:, :1], batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)

    expected = model_of(make(steps=steps), replicas=2)
    run(expected)
    with pytest.raises(Interrupted):
        run(model_of(make(steps=steps), replicas=2), keras.callbacks.BackupAndRestore(tmp_path), Interruption())
    resumed = model_of(make(steps=steps), replicas=2)
    run(resumed, keras.callbacks.BackupAndRestore(tmp_path))
    check_same_state(resumed, expected)


@pytest.mark.parametrize("way", ["keras file", "weights, unbuilt", "checkpoint"])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_state_of_4_replicas_loads_on_others(replicas, way, tmp_path):
    """Between updates it is bit for bit the same state: no variable has a replica dimension."""
    steps = 2 if replicas == 1 else None
    model = model_of(make(steps=steps))
    fit(model, 0, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        resumed = resume(way, model, lambda: model_of(make(steps=steps), replicas=replicas), tmp_path)
        resumed.optimizer.build(resumed.trainable_variables)
    check_same_state(resumed, model)


# In the midst of an accumulation.


@pytest.mark.parametrize("name", ["VRLAMB", "VRMomentum", "LARS"])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_half_an_accumulation_of_4_replicas_goes_on_with_others(replicas, name, rng, tmp_path):
    """Its mean and variance are kept: the update is that of samples with the same two, and of those that follow."""
    start, shapes = [np.float32(rng.normal(size=(3, 2)))], [(3, 2)]
    first = harness.make_samples(rng, 1, 2 * 4, shapes)[0]
    then = harness.make_samples(rng, 1, 2 * replicas, shapes)[0]

    def begin(count, samples):
        strategy = harness.strategy_of(count)
        with strategy.scope():
            variables, optimizer = harness.make_variables(start), make(name, STEPS)
            optimizer.build(variables)
        return optimizer, variables, harness.make_step(strategy, optimizer, variables, count)

    def run(step, samples, count):
        for at in range(0, len(samples), count):
            step([tf.constant(np.stack(column)) for column in zip(*samples[at : at + count])])

    saved, _, step = begin(4, first)
    run(step, first, 4)
    path = tf.train.Checkpoint(optimizer=saved).save(tmp_path / "checkpoint")
    optimizer, variables, step = begin(replicas, then)
    with pytest.warns(UserWarning, match=f"of 4 replicas with 2 of {STEPS} .* has {replicas}: .* merged"):
        tf.train.Checkpoint(optimizer=optimizer).restore(path)
    run(step, then, replicas)
    column = np.stack([sample[0] for sample in first]).astype(np.float64)
    mean, deviation = column.mean(0), column.std(0)
    _, arguments, rule = harness.OPTIMIZERS[name]
    oracle = reference.Optimizer(values=start, **(arguments | rule))
    oracle.update([[mean + deviation], [mean - deviation]] * replicas + then)
    harness.assert_weights_close([variables[0].numpy()], oracle.w, 1e-5)


@pytest.mark.parametrize("saved, now", [(4, 1), (4, 2), (2, 8), (1, 3), (3, 3)])
@pytest.mark.parametrize("steps", [1, 5])
def test_merged_statistics_keep_mean_and_sum_of_squares(saved, now, steps, rng):
    samples = rng.normal(2.0, 1.0, size=(saved, steps, 6)) / saved
    means = samples.mean(1)
    means, deviations = state.merge(means, ((samples - means[:, None]) ** 2).sum(1), steps, now)
    assert means.shape == deviations.shape == (now, 6)
    exact = samples * saved
    np.testing.assert_allclose(means.sum(0), exact.mean((0, 1)))
    within = (deviations * now**2).sum(0) / (now * steps)
    np.testing.assert_allclose(within, exact.var((0, 1)), rtol=1e-6)
    assert np.ptp(means, axis=0).max() == 0


def test_accumulators_are_saved_in_the_midst_of_an_accumulation_only(tmp_path):
    model = model_of(make(steps=STEPS))
    sizes = []
    for batch in range(5):
        fit(model, batch, batch + 1)
        model.save_weights(tmp_path / "model.weights.h5")
        with h5py.File(tmp_path / "model.weights.h5") as file:
            keys = file["optimizer/vars"].keys()
            sizes.append(sum("accumulated" in key for key in keys))
            if sizes[-1]:
                assert file["optimizer/vars/accumulated_mean_0"].shape == (4, 3, 4)
    assert sizes == [8, 8, 8, 0, 8]  # mean and deviations of 4 variables


def test_what_an_earlier_accumulation_left_is_not_restored_into_the_next(tmp_path):
    """A state between updates is loaded by an optimizer that stands in the midst of an accumulation."""
    saved, other = model_of(make(steps=STEPS)), model_of(make(steps=STEPS))
    fit(saved, 0, 4)
    fit(other, 0, 6)
    saved.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    for model in (saved, other):
        fit(model, 4, 8)
    check_same_state(other, saved)


# State that does not fit.

SHAPES = [(3, 4), (4,)]
UNFIT = {
    "accumulation": (dict(steps=2), {}, r"gradient_accumulation_steps: saved with 2, here None"),
    "other accumulation": (dict(steps=2), dict(steps=4), r"gradient_accumulation_steps: saved with 2, here 4"),
    "rule": (dict(name="VRMomentum"), dict(name="VRLARS"), r"rule: saved with VRSGD, here LARS"),
    "shape": ({}, dict(shapes=[(3, 5), (4,)]), r"shape of variable_0: saved \(3, 4\), here \(3, 5\)"),
    "rank": ({}, dict(shapes=[(3, 4), (4, 1)]), r"shape of variable_1: saved \(4,\), here \(4, 1\)"),
    "fewer": ({}, dict(shapes=[(3, 4)]), r"variables: saved 2 variables \(.*\), here 1 variables \(variable_0\)"),
    "average": (dict(use_ema=True), {}, r"slot average: saved for 2 variables \(.*\), here for no variable"),
    "ratio": ({}, dict(exclude_from_gsnr=["_1"]), r"slot ratio_average: saved for 2 .*, here for 1 variables"),
    "plain": ({}, dict(name="LAMB"), r"slot ratio_average: saved for 2 variables \(.*\), here for no variable"),
    "momentum": (dict(name="VRSGD"), dict(name="VRMomentum"), r"slot momentum: saved for no variable, here for 2"),
}


def trained(name="VRLAMB", shapes=SHAPES, steps=None, updates=1, **arguments):
    samples = harness.make_samples(np.random.default_rng(2), updates, 2 * (steps or 1), shapes)
    return harness.train(lambda: make(name, steps, **arguments), [np.ones(shape) for shape in shapes], samples, 2)


def transfer(way, saved, optimizer, path):
    """Loads the state of one optimizer into another, as Keras does, or as TensorFlow does."""
    if way == "keras":
        store = {}
        saved.save_own_variables(store)
        optimizer.load_own_variables(store)
    else:
        checkpoint = tf.train.Checkpoint(optimizer=saved).save(path / "checkpoint")
        tf.train.Checkpoint(optimizer=optimizer).restore(checkpoint)


@pytest.mark.parametrize("built", [True, False], ids=["built", "unbuilt"])
@pytest.mark.parametrize("way", ["keras", "checkpoint"])
@pytest.mark.parametrize("saved, own, message", UNFIT.values(), ids=UNFIT)
@pytest.mark.filterwarnings("ignore")
def test_state_that_does_not_fit_is_an_error_that_names_the_difference(saved, own, message, way, built, tmp_path):
    saved, run = trained(**saved).optimizer, trained(updates=2, **own)
    if built:
        optimizer = run.optimizer
        before = [variable.numpy() for variable in optimizer.variables]
        with pytest.raises(ValueError, match=message) as error:
            transfer(way, saved, optimizer, tmp_path)
        assert "none of it is restored" in str(error.value)
        for variable, value in zip(optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    else:
        optimizer = type(run.optimizer).from_config(run.optimizer.get_config())
        with pytest.raises(ValueError, match=message):
            transfer(way, saved, optimizer, tmp_path)
            optimizer.build(run.variables)
        if optimizer._pending_states:  # Asked once more, it is not forgotten.
            with pytest.raises(ValueError, match=message):
                optimizer.build(run.variables)


def test_state_of_the_same_rule_under_another_name_fits(tmp_path):
    """VRMomentum is VRSGD with momentum; LAMB's state is that of VRLAMB without its average."""
    for saved, own in (
        (("VRMomentum", {}), ("VRSGD", {"momentum": 0.5})),
        (("LAMB", {}), ("VRLAMB", {"beta_3": None})),
    ):
        saved, optimizer = trained(saved[0], **saved[1]).optimizer, trained(own[0], updates=2, **own[1]).optimizer
        transfer("keras", saved, optimizer, tmp_path)
        np.testing.assert_array_equal(optimizer._slots.momentum[0].numpy(), saved._slots.momentum[0].numpy())


def test_state_of_a_stock_optimizer_is_an_error_and_skipping_it_is_possible(tmp_path):
    model = model_of("adam")
    fit(model, 0, 2)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of(make())
    with pytest.raises(ValueError, match=r"state of another optimizer.*skip_mismatch=True"):
        other.load_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="state of another optimizer"):
        other.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(other.optimizer.iterations) == 0


def test_file_without_an_optimizer_leaves_it_as_it_is_and_says_so(tmp_path):
    model = model_of(make())
    fit(model, 0, 2)
    bare = keras.Sequential.from_config(model.get_config())
    bare.save_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="no state of an optimizer"):
        model.load_weights(tmp_path / "model.weights.h5")
    assert int(model.optimizer.iterations) == 2


def test_state_from_before_the_first_step_sets_back_to_it(tmp_path):
    saved, run = make(), trained(updates=2)
    run.optimizer.learning_rate = 0.5
    transfer("keras", saved, run.optimizer, tmp_path)
    assert int(run.optimizer.iterations) == 0
    assert float(run.optimizer.learning_rate.numpy()) == np.float32(0.05)
    assert all(np.all(v.numpy() == 0) for v in run.optimizer.variables if v.ndim)


@pytest.mark.parametrize("way", ["keras", "checkpoint"])
def test_other_exclusions_than_the_saved_ones_are_said(way, tmp_path):
    saved = trained(exclude_from_weight_decay=["_0"]).optimizer
    other = trained(exclude_from_weight_decay=["_1"]).optimizer
    with pytest.warns(UserWarning, match=r"with exclude_from_weight_decay=\['_0'\].*goes on with its own: \['_1'\]"):
        transfer(way, saved, other, tmp_path)


def test_float_and_schedule_may_change_places(tmp_path):
    """The learning rate is a hyperparameter: what holds is what the optimizer was made with."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    to_schedule, to_float = trained(learning_rate=schedule).optimizer, trained().optimizer
    transfer("keras", trained(updates=3).optimizer, to_schedule, tmp_path)
    assert float(to_schedule.learning_rate) == 0.5 * 0.5**3
    transfer("keras", trained(learning_rate=schedule, updates=3).optimizer, to_float, tmp_path)
    assert float(to_float.learning_rate.numpy()) == np.float32(0.05) and int(to_float.iterations) == 3


def test_checkpoint_of_a_float_rate_into_a_schedule_is_refused_with_the_way_out(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    with pytest.raises(ValueError, match=r"is a schedule.* was a variable\. Use save_weights and load_weights"):
        transfer("checkpoint", trained().optimizer, trained(learning_rate=schedule).optimizer, tmp_path)


def test_differences_name_many_variables_shortly():
    saved = {"rule": "LAMB", "gradient_accumulation_steps": None, "slots": {}}
    many = saved | {"variables": [(f"layer_{i}/kernel", [2]) for i in range(100)]}
    found = state.differences(saved | {"variables": [("a", [2])]}, many)
    assert len(found) == 1 and len(found[0]) < 300 and "100 variables" in found[0]


# Learning rates.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [None, STEPS])
def test_schedule_goes_on_where_it_was(steps, way, tmp_path):
    def fresh():
        rate = keras.optimizers.schedules.PolynomialDecay(0.1, 10, end_learning_rate=0.0)
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        return model_of(make(steps=steps, learning_rate=rate, weight_decay=decay))

    model = fresh()
    fit(model, 0, 6)
    resumed = resume(way, model, fresh, tmp_path)
    updates = 1 if steps else 6
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.1 * (1 - updates / 10))
    for m in (resumed, model):
        fit(m, 6, 8)
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.1 * (1 - (2 if steps else 8) / 10))
    check_same_state(resumed, model)


@pytest.mark.parametrize("way", WAYS)
def test_learning_rate_that_was_assigned_is_restored(way, tmp_path):
    model = model_of(make())
    model.optimizer.learning_rate = 0.125
    fit(model, 0, 2)
    resumed = resume(way, model, lambda: model_of(make()), tmp_path)
    resumed.optimizer.build(resumed.trainable_variables)
    assert float(resumed.optimizer.learning_rate.numpy()) == 0.125


# Other copies.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_on_their_own(copied):
    model = model_of(make(steps=STEPS), replicas=1)
    fit(model, 0, 6)
    other = copied(model)
    before = [weight.copy() for weight in model.get_weights()]
    fit(other, 6, 8)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    fit(model, 6, 8)
    check_same_state(other, model)


def test_compiled_model_is_saved_as_a_saved_model(tmp_path):
    model = model_of(make(steps=STEPS))
    fit(model, 0, 6)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    x = np.ones((4, 3), np.float32)
    found = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"](tf.constant(x))
    np.testing.assert_allclose(next(iter(found.values())), model(x), rtol=1e-6)


def test_description_is_text_that_names_the_variables():
    store = {}
    trained(steps=2).optimizer.save_own_variables(store)
    description = json.loads(store["description"].tobytes())
    assert description["variables"] == [["variable_0", [3, 4]], ["variable_1", [4]]]
    assert description["gradient_accumulation_steps"] == 2 and description["accumulated_steps"] == 0
