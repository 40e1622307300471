"""The parts of the rules that the optimizers' own tests do not pin down."""

import numpy as np
import pytest
import tensorflow as tf

from vrgd_tf import programs, rules


@pytest.fixture(params=["compiled", "one operation after the other"])
def call(request):
    """How the optimizers call a function of this module."""
    return programs.call if request.param == "compiled" else programs.call_uncompiled


# Sizes that the compiled reductions divide, and that they do not.
@pytest.mark.parametrize("shape", [(32, 20), (31, 21)])
@pytest.mark.parametrize("exponent", [-30, -25, -12, 0, 12, 25, 30])
def test_norm_of_any_scale(exponent, shape, call, rng):
    x = np.float32(rng.normal(size=shape) * 10.0**exponent)
    expected = np.linalg.norm(np.float64(x))
    np.testing.assert_allclose(call(rules.norm_of_any_scale, tf.constant(x)).numpy(), expected, rtol=1e-5)
    if abs(exponent) <= 12:
        np.testing.assert_allclose(call(rules.norm, tf.constant(x)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("size", [2**24, 2**24 + 3])
def test_norm_of_a_huge_layer(size, call, rng):
    x = np.float32(rng.normal(size=size))
    expected = np.linalg.norm(np.float64(x))
    for norm in (rules.norm, rules.norm_of_any_scale):
        np.testing.assert_allclose(call(norm, tf.constant(x)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("x", [[], [0.0], [0.0, 0.0]])
def test_norm_of_nothing(x, call):
    assert call(rules.norm_of_any_scale, tf.constant(x, tf.float32)).numpy() == 0


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_element_that_is_not_finite_is_found_wherever_it_stands(bad, size, call):
    good = tf.constant(np.full(size, 3e38, np.float32))  # finite, though their sum is not
    assert call(rules.is_finite, good)
    assert call(rules.is_finite, tf.zeros(0))
    for at in range(size):
        x = tf.tensor_scatter_nd_update(good, [[at]], [bad])
        assert not call(rules.is_finite, x)
        assert not np.isfinite(call(rules.norm_of_any_scale, x).numpy())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_bias_correction_to_full_precision(beta, step):
    exact = -np.expm1(step * np.log(np.float64(beta))) if beta else 1.0
    np.testing.assert_allclose(rules.bias_correction(beta, tf.constant(step, tf.float32)).numpy(), exact, rtol=1e-6)


@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 1000, 65535, 65536, 10**9])
def test_divide_count(divisor, call, rng):
    near = [2**16, 2**31, 2**32, 2**48 - 1, 7 * divisor]
    counts = {0, 1, *near, *(n - 1 for n in near), *rng.integers(2**48, size=50).tolist()}
    for count in counts:
        found = call(rules.divide_count, tf.constant(count, tf.int64), divisor=divisor)
        assert [int(x) for x in found] == list(divmod(count, divisor))
        assert {x.dtype for x in found} == {tf.int64}


LAYERWISE = dict(momentum=0.0, nesterov=False, trust_coefficient=0.01, adapt=True)


@pytest.mark.parametrize("w, g", [([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])])
def test_trust_ratio_is_1_where_a_norm_is_zero(w, g):
    w, g = tf.constant(w), tf.constant(g)
    new, _ = rules.lars(w, g, None, 0.5, None, **LAYERWISE)
    np.testing.assert_array_equal(new, w - 0.5 * g)
    zeros, step = tf.zeros_like(w), tf.constant(1.0)
    new, *_ = rules.lamb(
        w, g, g, zeros, zeros, 0.5, step, None, beta_1=0.9, beta_2=0.999, epsilon=0.0 if np.any(g) else 1.0, adapt=True
    )
    np.testing.assert_allclose(new, w - 0.5 * tf.sign(g), rtol=1e-5)


def test_lars_without_decay_keeps_its_trust_ratio():
    new, _ = rules.lars(tf.constant([3.0, 4.0]), tf.constant([0.0, 2.0]), None, 1.0, None, **LAYERWISE)
    np.testing.assert_allclose(new, [3.0, 4.0 - 0.01 * 5 / 2 * 2], rtol=1e-6)
