"""BackupAndRestore: what real processes leave when they are killed, and what the next one makes of it."""

import os
import random
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import vrgd_tf
from tests import harness, interrupted


def start(directory, result, steps=0, die_in_epoch=0):
    arguments = [str(directory), str(result), str(steps), str(die_in_epoch)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interrupted", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "default::UserWarning"},
    )


def finish(process):
    """The output of a process that ends by itself, well."""
    try:
        output = process.communicate(timeout=240)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    return output


def read_batches(process, count):
    """Waits until the process has done so many batches; False if it ended before."""
    while count:
        line = process.stdout.readline()
        if not line:
            return False
        count -= line.startswith("batch")
    return True


def check_same(found, expected):
    with np.load(found) as a, np.load(expected) as b:
        assert a.files == b.files and int(a["iterations"]) > 0
        for key in b.files:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of a run with 4 accumulation steps that nobody disturbed; its epochs end in the midst of one."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    finish(start(directory / "backup", directory / "result.npz", steps=4))
    return directory / "result.npz"


def test_run_that_is_killed_ten_times_ends_with_the_same_weights(uninterrupted, tmp_path):
    moments, kills = random.Random(0), 0
    while kills < 10:
        process = start(tmp_path / "backup", tmp_path / "result.npz", steps=4)
        try:
            # Not so far that the run would end before it was killed ten times.
            assert read_batches(process, moments.randint(1, 14 if kills % 2 else interrupted.BATCHES - 1))
        finally:
            process.kill()
            process.communicate()
        kills += 1
    finish(start(tmp_path / "backup", tmp_path / "result.npz", steps=4))
    check_same(tmp_path / "result.npz", uninterrupted)


def test_kill_while_saving_costs_that_epoch_only_and_is_said(uninterrupted, tmp_path):
    process = start(tmp_path / "backup", tmp_path / "result.npz", steps=4, die_in_epoch=3)
    process.communicate(timeout=240)
    assert process.returncode == -9
    assert {path.name for path in (tmp_path / "backup").iterdir()} == {
        "epoch-000001.weights.h5",
        "epoch-000002.weights.h5",
        "unfinished.weights.h5",
    }
    output = finish(start(tmp_path / "backup", tmp_path / "result.npz", steps=4))
    assert "was not finished; the one before it is used" in output
    assert "batch 2 0" in output and "batch 1 " not in output
    check_same(tmp_path / "result.npz", uninterrupted)


@pytest.mark.parametrize("part, replicas", [(0, 2), (0.3, 2), (0.9, 2), (0.5, 1)])
def test_truncated_backup_is_passed_over_for_the_one_before_it_and_that_is_said(part, replicas, tmp_path):
    def run(*callbacks, epochs):
        model = interrupted.model_of(4, replicas)
        x = np.float32(np.random.default_rng(0).normal(size=(48, 3)))
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    run(vrgd_tf.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    newest = tmp_path / "epoch-000002.weights.h5"
    os.truncate(newest, int(newest.stat().st_size * part))
    with pytest.warns(UserWarning, match=r"after epoch 1, from an earlier backup.*epoch-000002"):
        resumed = run(vrgd_tf.BackupAndRestore(tmp_path), epochs=3)
    expected = run(epochs=3)
    for a, b in zip(resumed.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert int(resumed.optimizer.iterations) == int(expected.optimizer.iterations)


# In one process.


def fit(model, callback, epochs, size=32):
    x = np.float32(np.random.default_rng(0).normal(size=(size, 3)))
    return model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_keeps_so_many_backups_and_removes_them_at_the_end(tmp_path):
    model = interrupted.model_of(None)
    fit(model, vrgd_tf.BackupAndRestore(tmp_path, keep=2, delete_checkpoint=False), epochs=3)
    assert names(tmp_path) == ["epoch-000002.weights.h5", "epoch-000003.weights.h5"]
    assert fit(model, vrgd_tf.BackupAndRestore(tmp_path), epochs=4).epoch == [3]
    assert names(tmp_path) == []
    assert fit(model, keras.callbacks.Callback(), epochs=1).epoch == [0]


def test_backup_that_does_not_fit_is_an_error_with_the_reason(tmp_path):
    fit(interrupted.model_of(None), vrgd_tf.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    with pytest.raises(ValueError, match=r"(?s)No backup in .* gradient_accumulation_steps: saved with None, here 4"):
        fit(interrupted.model_of(4), vrgd_tf.BackupAndRestore(tmp_path), epochs=3)
    assert len(names(tmp_path)) == 2


def test_failing_save_leaves_the_earlier_backup_and_raises(tmp_path, monkeypatch):
    model = interrupted.model_of(None)
    fit(model, vrgd_tf.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=1)

    def full_disk(path, **_):
        with open(path, "wb") as file:
            file.write(b"\x89HDF")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_weights", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fit(model, vrgd_tf.BackupAndRestore(tmp_path), epochs=2)
    with pytest.warns(UserWarning, match="was not finished"):
        assert fit(interrupted.model_of(None), vrgd_tf.BackupAndRestore(tmp_path), epochs=2).epoch == [1]


def test_other_optimizers_are_restored_too(tmp_path):
    def model():
        keras.utils.set_random_seed(1)
        with harness.strategy_of(2).scope():
            result = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            result.compile(optimizer="adam", loss="mse")
        return result

    first, expected = model(), model()
    fit(first, vrgd_tf.BackupAndRestore(tmp_path, delete_checkpoint=False), epochs=2)
    resumed = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(resumed, vrgd_tf.BackupAndRestore(tmp_path), epochs=3)
    fit(expected, keras.callbacks.Callback(), epochs=3)
    np.testing.assert_array_equal(resumed.get_weights()[0], expected.get_weights()[0])


@pytest.mark.parametrize(
    "arguments",
    [{"backup_dir": ""}, {"backup_dir": None}, {"keep": 0}, {"keep": 1.5}, {"keep": True}],
    ids=str,
)
def test_bad_arguments_say_what_was_received(arguments):
    with pytest.raises(ValueError, match="Received: "):
        vrgd_tf.BackupAndRestore(**({"backup_dir": "backup"} | arguments))
