"""Compiled programs are shared, and no more than one is made for each signature.

Counts traces. Not covered: how often XLA compiles what was traced, which is once for each device that runs it.
"""

import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import vrgd_tf
from tests import harness
from vrgd_tf import programs


def test_same_signature_is_traced_once():
    traces = []

    def function(tensors, other, *, factor):
        traces.append(factor)
        return {"sum": tensors["a"] + tensors["b"] * factor, "other": other}

    def call(a, factor=2, other=None):
        return programs.call(function, {"a": a, "b": tf.ones_like(a)}, other, factor=factor)

    for value in (1.0, 5.0):
        result = call(tf.constant([value]))
        assert result["sum"].numpy() == value + 2 and result["other"] is None
    assert len(traces) == 1
    call(tf.constant([1.0, 2.0]))  # another shape
    call(tf.constant([1.0], tf.float64))  # another dtype
    call(tf.constant([1.0]), factor=3)  # another static value
    assert call(tf.constant([1.0]), other=tf.constant(7.0))["other"].numpy() == 7  # another structure
    assert len(traces) == 5


def test_optimizers_share_their_programs(rng):
    """A search over learning rates, weight decays, seeds and numbers of steps compiles each update once."""
    samples = harness.make_samples(rng, 2, 2, [(4, 3), (3,), (4, 3)])
    start = [np.ones((4, 3)), np.ones(3), np.ones((4, 3))]

    def train(**arguments):
        harness.train(lambda: vrgd_tf.VRLAMB(**arguments), start, samples, 2)
        return len(programs._programs)

    first = train(learning_rate=0.1, weight_decay=0.1)
    assert train(learning_rate=0.2, weight_decay=0.3) == first
    # Another rule is another program, one for each of the two shapes; the local statistics stay the same.
    assert train(learning_rate=0.1, weight_decay=0.1, gamma=0.25) == first + 2


@pytest.mark.parametrize("replicas, steps", [(1, 2), (2, None), (2, 2)])
@pytest.mark.parametrize("name", ["VRMomentum", "VRLAMB"])
def test_first_update_traces_one_program_for_each_shape_and_later_ones_none(name, replicas, steps, rng, monkeypatch):
    monkeypatch.setattr(programs, "_programs", {})
    shapes = [(5, 3), (3,), (5, 3), (3,)]
    cls, arguments, _ = harness.OPTIMIZERS[name]
    samples = harness.make_samples(rng, 3, replicas * (steps or 1), shapes)
    traced = []

    def train(updates):
        start = [np.ones(shape) for shape in shapes]
        harness.train(lambda: cls(**arguments, gradient_accumulation_steps=steps), start, updates, replicas)
        traced.append(sorted(function.__qualname__ for function, *_ in programs._programs))

    train(samples[:1])
    train(samples)
    assert traced[0] == traced[1]
    # The statistics of accumulation, the variance, the finite check and the rule.
    functions = set(traced[0])
    assert len(functions) == (4 if steps else 3)
    assert {name: traced[0].count(name) for name in functions} == dict.fromkeys(functions, len(set(shapes)))


def move(values, by, *, factor):
    return {name: value + by * factor for name, value in values.items()}


def test_update_writes_to_the_variables_that_it_is_given():
    """Also where variables of one shape share a program, and where a step is traced around it."""
    variables = [{"a": tf.Variable([1.0, 2.0]), "b": tf.Variable(np.zeros(2))} for _ in range(2)]
    programs.update(move, {"a": variables[0]["a"]}, tf.constant(1.0), factor=2.0)
    np.testing.assert_array_equal(variables[0]["a"], [3, 4])

    @tf.function
    def step():
        before = variables[1]["a"].read_value()
        for _ in range(2):
            programs.update(move, {"a": variables[1]["a"]}, tf.constant(10.0), factor=1.0)
        return before, variables[1]["a"].read_value()

    before, after = step()
    np.testing.assert_array_equal(before, [1, 2])  # What was read before keeps its value.
    np.testing.assert_array_equal(after, [21, 22])
    np.testing.assert_array_equal(variables[0]["a"], [3, 4])


def test_peak_of_memory_in_an_update():
    """On one device no more than two copies of the parameters beyond variables and gradients, measured.

    Three before TensorFlow 2.21, whose XLA holds more intermediate results.
    """
    copies = 2 if tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 21) else 3
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.update_memory", "--replicas=1", "--optimizers=VRLAMB", "--rounds=3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    # 0.2 for what is not of the size of parameters.
    assert 0 < float(re.search(r"VRLAMB \| ([\d.]+)", result.stdout)[1]) <= copies + 0.2


def test_update_of_another_structure_changes_nothing():
    variable = tf.Variable([1.0])
    with pytest.raises((TypeError, ValueError)):
        programs.update(lambda values: (values, values), variable)
    assert variable.numpy() == 1


@pytest.mark.parametrize("size", [0, 1, 15, 16, 48, 49])
def test_reductions_are_the_same_in_and_out_of_a_program(size, rng):
    x = tf.constant(np.abs(rng.normal(size=(size, 3))), tf.float32)
    for reduction, exact in ((programs.total, np.sum), (programs.largest, lambda x: np.max(x, initial=-np.inf))):
        for found in (reduction(x), programs.call(reduction, x)):
            np.testing.assert_allclose(found, exact(np.float64(x)), rtol=1e-6)
