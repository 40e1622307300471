"""The numbers of the program that a TPU would run: one replica's part, exported, and run on 4 and 8 CPU devices."""

import numpy as np
import pytest
import tensorflow as tf

from tests import harness
from tests.test_optimizers import reference_weights
from tests.tpu import needs_jax
from tpu_aot.execute import execute
from tpu_aot.export import export, replica_strategy
from vrgd_tf import replicas as replicas_module

SHAPES = [(6, 4), (4,), (2, 3, 4), ()]


@pytest.fixture(params=["all in one group", "a group for each variable"])
def groups(request, monkeypatch):
    """The groups that an update takes one after the other: these variables are too small to make more than one."""
    if request.param != "all in one group":
        monkeypatch.setattr(replicas_module, "_GROUP_BYTES", 1)
        monkeypatch.setattr(replicas_module, "_KEPT_GROUPS", 2)


def run(name, start, samples, replicas, steps=None, **changes):
    """`(optimizer, variables, value)` after the exported program ran on `samples`; `value(v)` is [replicas, ...]."""
    cls, arguments, _ = harness.OPTIMIZERS[name]
    strategy = replica_strategy(replicas)
    with strategy.scope():
        variables = harness.make_variables(start)
        optimizer = cls(gradient_accumulation_steps=steps, **(arguments | changes))
        optimizer.build(variables)

    def step(*gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    program = export(strategy, step, *[tf.TensorSpec(v.shape) for v in variables])
    batches = [update[i : i + replicas] for update in samples for i in range(0, len(update), replicas)]
    # As a loss that is divided by the number of replicas would give them.
    batches = [[np.float32(np.stack(column) / replicas) for column in zip(*batch)] for batch in batches]
    _, values = execute(program, replicas, batches)
    for variable in optimizer.variables:
        value = values[program.index(variable)]
        if variable.synchronization != "on_read":
            np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape), err_msg=variable.path)
    return optimizer, variables, lambda variable: values[program.index(variable)]


def check(variables, value, expected, tolerance=1e-5):
    for replica in range(len(value(variables[0]))):
        harness.assert_weights_close([value(v)[replica] for v in variables], expected, tolerance)


@needs_jax
@pytest.mark.parametrize("replicas, steps", [(4, 2), (8, None)])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_exported_program_equals_the_float64_reference(name, replicas, steps, groups, rng):
    start = [rng.normal(size=shape) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, replicas * (steps or 1), SHAPES)
    _, variables, value = run(name, start, samples, replicas, steps)
    check(variables, value, reference_weights(name, start, samples)[-1])


FEATURES = {
    "clipnorm": (dict(clipnorm=0.5), 1e-5),
    "global_clipnorm": (dict(global_clipnorm=0.5), 1e-5),
    "average that overwrites": (dict(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2), 1e-5),
    "no skipping": (dict(skip_nonfinite=False), 1e-5),
    # 8 bits of the variance: a ratio is off by 0.4 %.
    "bfloat16 variance": (dict(variance_dtype="bfloat16"), 2e-3),
}


@needs_jax
@pytest.mark.parametrize("feature", FEATURES)
def test_features_equal_the_float64_reference(feature, rng):
    changes, tolerance = FEATURES[feature]
    start = [rng.normal(size=shape) for shape in SHAPES]
    samples = harness.make_samples(rng, 4, 4, SHAPES)
    _, variables, value = run("VRLAMB", start, samples, 4, **changes)
    own = {k: v for k, v in changes.items() if k not in ("skip_nonfinite", "variance_dtype")}
    check(variables, value, reference_weights("VRLAMB", start, samples, **own)[-1], tolerance)


@needs_jax
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("at", [1, 3])
def test_update_with_a_bad_sample_on_one_replica_is_skipped_on_all(at, bad, groups, rng):
    """3e38 on two of the replicas is finite on each, and not in their sum."""
    start = [rng.normal(size=shape) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, 4, SHAPES)
    good = [samples[0], samples[2]]
    for replica in [1, 2] if np.isfinite(bad) else [2]:
        sample = np.array(samples[1][replica][at], np.float64)
        sample.flat[0] = 4 * bad  # Each replica has a fourth of it.
        samples[1][replica][at] = sample
    optimizer, variables, value = run("VRMomentum", start, samples, 4)
    check(variables, value, reference_weights("VRMomentum", start, good)[-1])
    np.testing.assert_array_equal(value(optimizer._skipped_updates), [1] * 4)
