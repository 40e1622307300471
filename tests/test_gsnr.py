"""The statistics and the ratio against float64, at every scale, and their properties."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import reference
from vrgd_tf import gsnr, programs


def ratio(samples, replicas=None, gamma=0.1, ratio_max=1.0):
    """The ratio of `samples` [k, ...], spread over so many replicas; without, each sample has its own."""
    samples = tf.constant(np.asarray(samples, np.float32))
    k = len(samples)
    replicas = replicas or k
    steps = k // replicas
    statistics = []
    for replica in range(replicas):
        mean, deviations = samples[replica], None
        if steps > 1:
            mean = deviations = tf.fill(samples.shape[1:], np.nan)  # what was there before must not matter
            for step in range(steps):
                mean, deviations = gsnr.accumulate(samples[step * replicas + replica], mean, deviations, step)
        statistics.append((mean / replicas, None if deviations is None else deviations / replicas**2))
    gradient = tf.add_n([mean for mean, _ in statistics])
    shares = [gsnr.relative_variance(m, gradient, d, replicas=replicas, steps=steps) for m, d in statistics]
    r, defined = gsnr.gsnr(gradient, tf.add_n(shares), k)
    return gsnr.layer_ratio(r, defined, gamma, ratio_max).numpy()


def noisy(rng, k, shape, signal=0.3):
    return np.float32(rng.normal(size=(k, *shape)) + signal * rng.normal(size=shape))


SPLITS = [(4, 4), (8, 8), (6, 2), (6, 1), (16, 4), (2, 2)]


@pytest.mark.parametrize("exponent", [-25, -15, 0, 15, 25, -30, 30])
@pytest.mark.parametrize("k, replicas", SPLITS)
def test_ratio_equals_float64_at_every_scale(k, replicas, exponent, rng):
    if k != replicas and abs(exponent) > 15:
        exponent = int(np.copysign(15, exponent))  # accumulated squares are held in float32
    samples = np.float32(noisy(rng, k, (40, 25)) * 10.0**exponent)
    np.testing.assert_allclose(ratio(samples, replicas), reference.ratio(samples), atol=1e-4)


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3, 1e-4, 2e-5])
@pytest.mark.parametrize("k, replicas", SPLITS)
def test_ratio_where_samples_nearly_agree(k, replicas, spread, rng):
    # The one-pass form is off by 9x at 1e-3. A running mean is itself rounded, to 6e-8 of its value, so that with
    # accumulation no two words of state are exact to 1e-4 where the samples' spread is below 3e-3 of it.
    samples = np.float32(rng.normal(size=(40, 25)) * (1 + spread * rng.normal(size=(k, 40, 25))))
    tolerance = 1e-4 if k == replicas else max(1e-4, 3e-7 / spread)
    np.testing.assert_allclose(ratio(samples, replicas), reference.ratio(samples), atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 1000, 2**24 + 3])
def test_ratio_of_small_and_of_huge_layers(size, rng):
    samples = noisy(rng, 4, (size,))
    np.testing.assert_allclose(ratio(samples), reference.ratio(samples), atol=1e-4)


@pytest.mark.parametrize("size", [2**24, 2**24 + 3])
def test_layer_mean_is_exact_in_the_compiled_update_too(size, rng):
    r = np.float32(rng.exponential(size=size) + 1e-3)
    found = programs.call(gsnr.layer_ratio, tf.constant(r), tf.ones(r.shape, tf.bool), gamma=0.1, ratio_max=1.0).numpy()
    np.testing.assert_allclose(found, np.clip(r / r.mean(dtype=np.float64), 0.1, 1), atol=1e-4)


def test_no_signal_is_gamma_and_is_counted():
    # Elements: noise without a mean, two with GSNR 4 and 1.
    samples = np.array([[1, 1.5, 2], [-1, 0.5, 0]], np.float32)
    np.testing.assert_allclose(ratio(samples), [0.1, 1, 1 / (5 / 3)], rtol=1e-6)


@pytest.mark.parametrize("replicas", [2, 1])
def test_undefined_elements_take_the_plain_step_and_leave_the_mean_alone(replicas):
    # Elements: all samples agree; no gradient; GSNR 4 and 1, whose mean is 2.5.
    samples = np.array([[3, 0, 1.5, 2], [3, 0, 0.5, 0]], np.float32)
    np.testing.assert_allclose(ratio(samples, replicas), [1, 1, 1, 0.4], rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-40])
@pytest.mark.parametrize("k, replicas", SPLITS)
def test_layer_without_variance_is_the_plain_optimizer(k, replicas, value):
    np.testing.assert_array_equal(ratio(np.full((k, 5), value), replicas), np.ones(5))


def test_layer_of_pure_cancellation_is_the_plain_optimizer():
    np.testing.assert_array_equal(ratio([[1.0, 2.0], [-1.0, -2.0]]), np.ones(2))


@pytest.mark.parametrize("k", [3, 7, 12, 100, 1000])
def test_agreement_is_recognised_whatever_the_rounding_of_the_mean(k, rng):
    # 1/k is no float32 for these k; the samples agree all the same.
    samples = np.repeat(np.float32(rng.normal(size=(1, 500))), k, 0)
    np.testing.assert_array_equal(ratio(samples), np.ones(500))


def test_one_element_has_ratio_1(rng):
    assert ratio(noisy(rng, 4, ()))[()] == 1
    assert ratio(noisy(rng, 4, (1,)))[0] == 1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("exponent", [-40, -35, 0, 10])
def test_layer_ratio_of_any_scale(exponent, compiled):
    """Where the mean GSNR is zero to float32 all take the plain step; no quotient becomes NaN."""
    r = tf.constant(np.float32(np.array([0, 0.01, 2, 1] + 12 * [0.5]) * 10.0**exponent))
    ratio = functools.partial(programs.call, gsnr.layer_ratio) if compiled else gsnr.layer_ratio
    found = ratio(r, tf.ones(16, tf.bool), gamma=0.1, ratio_max=1.0).numpy()
    np.testing.assert_allclose(found, np.ones(16) if exponent == -40 else [0.1, 0.1, 1, 1] + 12 * [8 / 9.01], rtol=1e-6)


def test_layer_without_elements():
    assert ratio(np.zeros((4, 0, 3))).shape == (0, 3)


def test_opposite_huge_samples_do_not_overflow_into_nan():
    found = ratio(np.array([[1e30, 1, 1e-30], [-1e30, 2, 1e30], [1e-30, 3, -1e30], [1e-30, 4, 1]]))
    assert np.isfinite(found).all()


SAMPLES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(2, 9), st.integers(0, 6)),
    elements=st.floats(-(2.0**20), 2.0**20, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
)
BOUNDS = st.tuples(st.floats(0.01, 1), st.floats(1, 100))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(SAMPLES, BOUNDS)
def test_ratio_is_finite_and_within_its_bounds(samples, bounds):
    gamma, ratio_max = bounds
    found = ratio(samples, gamma=gamma, ratio_max=ratio_max)
    assert np.all((found >= np.float32(gamma)) & (found <= np.float32(ratio_max)))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(SAMPLES, st.integers(-60, 60))
def test_ratio_does_not_depend_on_the_scale(samples, exponent):
    samples = np.where(abs(samples) < 2.0**-20, 0, samples)  # so that no scale makes it subnormal
    np.testing.assert_array_equal(ratio(samples), ratio(samples * np.float32(2.0**exponent)))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_ratio_does_not_depend_on_the_order_of_samples(k, seed):
    rng = np.random.default_rng(seed)
    samples = noisy(rng, k, (30,), signal=2)
    np.testing.assert_allclose(ratio(samples), ratio(rng.permutation(samples)), atol=1e-4)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(SAMPLES.filter(lambda s: s.size), st.integers(0, 100))
def test_a_sample_that_is_not_finite_reaches_the_mean(samples, where):
    samples = samples.copy()
    samples.flat[where % samples.size] = np.inf
    mean = None
    for step, sample in enumerate(samples):
        mean, _ = gsnr.accumulate(tf.constant(sample), mean if step else tf.zeros_like(sample), None, step)
    assert not np.isfinite(mean.numpy()).all()
