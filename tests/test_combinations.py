"""Random combinations of all that can be switched on, each against the float64 reference.

100 in every run of the tests, the same each time. Others, with --hypothesis-seed, by setting VRGD_TF_COMBINATIONS to
their number; some hundred in one process, since TensorFlow keeps each XLA program that it compiles.
"""

import os
import warnings

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests import harness, reference

COMBINATIONS = os.environ.get("VRGD_TF_COMBINATIONS")
SHAPES = [(4, 3), (5,), ()]
SPACING = {"float32": 2.0**-23, "float64": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
CLIPPINGS = [{}, {"clipvalue": 0.3}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}]
AVERAGES = [{}, {"use_ema": True, "ema_momentum": 0.6}, {"use_ema": True, "ema_overwrite_frequency": 2}]
GSNRS = [{}, {"gamma": 1.0}, {"gamma": 0.3, "ratio_max": 3.0}, {"beta_3": 0.5}, {"beta_3": None}]


@st.composite
def combinations(draw):
    name = draw(st.sampled_from(sorted(harness.OPTIMIZERS)))
    replicas, steps = draw(st.sampled_from([(4, None), (2, None), (2, 2), (4, 3), (1, 2), (1, 5)]))
    arguments = draw(st.sampled_from(CLIPPINGS)) | draw(st.sampled_from(AVERAGES))
    if name.startswith("VR"):
        arguments |= draw(st.sampled_from(GSNRS))
    if name in ("VRAdam", "VRLAMB"):
        arguments["second_moment"] = draw(st.sampled_from(["gradient", "scaled_gradient"]))
    arguments["weight_decay"] = draw(st.sampled_from([None, 0.1]))
    return {
        "name": name,
        "replicas": replicas,
        "steps": steps,
        "arguments": arguments,
        "dtype": draw(st.sampled_from(sorted(SPACING))),
        "sparse": draw(st.booleans()),
        "loss_scale_factor": draw(st.sampled_from([None, 64.0])),
        "run_eagerly": draw(st.booleans()),
        "jit_compile_update": draw(st.sampled_from([True, False, False])),
        "merge_call": draw(st.booleans()) or replicas != 2,
        "spoilt": draw(st.sampled_from([None, None, 0, 1])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@hypothesis.settings(
    max_examples=int(COMBINATIONS or 100), derandomize=COMBINATIONS is None, deadline=None, database=None
)
@hypothesis.given(combinations())
def test_every_combination_equals_the_float64_reference(combination):
    check(**combination)


def check(
    name, replicas, steps, arguments, dtype, sparse, loss_scale_factor, run_eagerly, jit_compile_update, merge_call,
    spoilt, seed,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    cls, defaults, rule = harness.OPTIMIZERS[name]
    strategy = harness.strategy_of(replicas, merge_call)
    with strategy.scope():
        variables = harness.make_variables([rng.normal(size=shape) for shape in SHAPES], dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = cls(
                **(defaults | arguments),
                gradient_accumulation_steps=steps,
                loss_scale_factor=loss_scale_factor,
                jit_compile_update=jit_compile_update,
            )
            optimizer.build(variables)
    values = [np.asarray(v.numpy(), np.float64) for v in variables]
    weight_decay = arguments["weight_decay"] or 0.0
    oracle = reference.Optimizer(values=values, **(rule | defaults | arguments | {"weight_decay": weight_decay}))
    step = harness.make_step(strategy, optimizer, variables, replicas, run_eagerly, sparse)
    k = replicas * (steps or 1)
    for number, update in enumerate(harness.make_samples(rng, 3, k, SHAPES)):
        # What the replicas get, rounded to the dtype of the variables.
        update = [[tf.cast(gradient, dtype) for gradient in sample] for sample in update]
        exact = [[np.asarray(gradient, np.float64) for gradient in sample] for sample in update]
        if number == spoilt:
            update[k // 2][0] = update[k // 2][0] * np.nan
            oracle.skipped += 1
        else:
            oracle.update(exact)
        for at in range(0, k, replicas):
            step([tf.stack(column) * (loss_scale_factor or 1) for column in zip(*update[at : at + replicas])])
        harness.check_replicas_agree(variables + optimizer.variables)
        for i, variable in enumerate(variables):
            found = np.asarray(variable.numpy(), np.float64)
            error = np.max(np.abs(found - oracle.w[i]))
            scale = np.max(np.abs(oracle.w[i])) + np.max(np.abs(values[i]))
            assert error <= max(0.51 * SPACING[dtype], 1e-5) * scale, (number, i, found, oracle.w[i])
            # From what was stored: the rounding of 16 bits is not an error of the next update.
            oracle.w[i] = found
    assert int(optimizer.iterations) == 3 and int(optimizer.skipped_updates) == (spoilt is not None)
