"""Compiled programs are shared, and no more than one is made for each signature.

Counts traces; how often XLA compiles a program, once for each device, is not covered.
"""

import numpy as np
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
