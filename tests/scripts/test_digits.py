"""The main job, in a process of its own, as a user starts it."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from tpu_scripts import digits


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tpu_scripts.digits", *arguments], capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    "flags", [[], ["--optimizer=VRLAMB", "--noise_pixels=20", "--replicas=4"]], ids=["plain", "noise"]
)
def test_leaves_metrics_models_and_plot(flags, tmp_path):
    result = run(f"--output_dir={tmp_path}", "--epochs=3", "--runs=2", "--global_batch_size=256", *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for key in ("plain", "vr", "short"):
        assert len(metrics["runs"][key]) == 2
        for one in metrics["runs"][key]:
            assert one["curves"]["train"][-1] == one["train_loss"] < one["curves"]["train"][0]
            assert one["generalization_gap"] == pytest.approx(one["test_loss"] - one["train_loss"])
            assert 0 < one["steps_to_target"] <= 12
    # The same weights and data: after one epoch the two differ, but not by much.
    first = [metrics["runs"][key][0]["curves"]["train"][0] for key in ("plain", "vr")]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=0.3)
    assert metrics["ratio_per_layer"]["layers"] == ["hidden_1", "hidden_2", "logits"]
    ratios = metrics["ratio_per_layer"]["after_each_epoch"]
    assert len(ratios) == 3 and all(0.1 <= r <= 1 for epoch in ratios for r in epoch)
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    inputs = 64 + metrics["setting"]["noise_pixels"]
    _, (x, y) = digits.load_data(inputs - 64)
    for key in ("plain", "vr"):
        model = keras.models.load_model(tmp_path / f"{key}.keras")
        assert model.input_shape == (None, inputs)
        # It is the one that the last run of this optimizer left.
        accuracy = np.mean(model.predict(x, verbose=0).argmax(-1) == y)
        assert accuracy == pytest.approx(metrics["runs"][key][-1]["test_accuracy"], abs=1e-6)
    assert "minus" in result.stdout and "test accuracy" in result.stdout
    assert ("artificial" in result.stdout) == bool(metrics["setting"]["noise_pixels"])


@pytest.mark.parametrize(
    "flags", [["--global_batch_size=500"], ["--global_batch_size=2048"], ["--optimizer=Adam"], ["x"]]
)
def test_bad_flags_say_what_is_expected(flags, tmp_path):
    result = run(f"--output_dir={tmp_path / 'none'}", *flags)
    assert result.returncode != 0
    assert flags[0].split("=")[-1] in result.stdout + result.stderr
    assert not (tmp_path / "none").exists()


def conclusion_of(differences):
    keys = ("test_loss", "test_accuracy", "generalization_gap")
    plain = [dict.fromkeys(keys, 1.0) for _ in differences]
    return digits.conclusion([dict.fromkeys(keys, 1.0 + d) for d in differences], plain, "VRSGD", "SGD")


def test_conclusion_claims_no_more_than_the_seeds_show():
    # Mean 2.9 standard errors from zero: with 3 seeds that happens by chance in one of ten.
    unclear = conclusion_of([-0.011, -0.003, -0.010])
    assert all("no difference that 3 seeds can show" in sentence for sentence in unclear)
    loss, accuracy, gap = conclusion_of([-0.010, -0.011, -0.0105])
    assert "VRSGD is better" in loss and "VRSGD is worse" in accuracy and "VRSGD is better" in gap
