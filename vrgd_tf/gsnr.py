"""From samples of a gradient to its signal-to-noise ratio, and to the ratio that scales it.

A *sample* is the gradient of one micro-batch on one replica. With ``k`` samples ``g_d`` of a tensor::

    gbar  = mean_d g_d
    v     = mean_d ((g_d - gbar) / gbar)^2
    r     = 1 / v                                      the GSNR, gbar^2 / sigma^2
    ratio = clip(r / mean(r over the tensor), gamma, ratio_max)

The method is VRGD's (Jiang et al., arXiv:2309.13681). The choices that its abstract leaves open are this
implementation's own: two passes, relative deviations, and what happens where the GSNR is undefined.

Everything here is a pure function of tensors: no variable, no strategy, no Keras. All tensors of one call share
one shape and one dtype, float32 or float64, except where a function says otherwise.
"""

import numpy as np
import tensorflow as tf

from vrgd_tf.programs import total

# Below this, float32 has no full precision left, and hardware may round to zero: such a number counts as zero.
_TINY = float(np.finfo(np.float32).tiny)
_EPSILON = float(np.finfo(np.float32).eps)


def is_zero(x):
    """Where `x` is zero to float32: a bool tensor of the shape of `x`. Subnormal numbers count as zero."""
    return tf.abs(x) < tf.constant(_TINY, x.dtype)


def accumulate(gradient, mean, squared_deviations, count):
    """Adds one sample to the running statistics of one replica (Welford, Technometrics 4(3), 1962).

    Args:
        gradient: the new sample.
        mean: mean of the samples so far.
        squared_deviations: sum of the samples' squared deviations from their mean, or None if only the mean is
            wanted.
        count: int scalar tensor, how many samples `mean` holds. At 0 the old statistics are not used, so they
            need no reset, and nothing that they held, NaN included, survives.

    Returns:
        `(mean, squared_deviations)` with the new sample, of the inputs' shape and dtype. The mean is rounded at each
        step, which limits the accuracy of the ratio to 1e-4 where the samples' standard deviation is 3e-3 of their
        mean, and to 1e-3 where it is 3e-4.
    """
    first = tf.equal(count, 0)
    old_mean = tf.where(first, gradient, mean)
    deviation = gradient - old_mean
    weight = 1 / tf.cast(count + 1, gradient.dtype)
    mean = old_mean + deviation * weight
    if squared_deviations is None:
        return mean, None
    squared_deviations = tf.where(first, tf.zeros_like(gradient), squared_deviations)
    # Not Welford's deviation * (gradient - mean): that takes the rounding of the new mean in as well.
    return mean, squared_deviations + tf.square(deviation) * (1 - weight)


def relative_variance(replica_mean, gradient, squared_deviations=None, *, replicas=1, steps=1, dtype=None):
    """One replica's share of `v`; the sum of the shares over the replicas is `v`.

    Relative to the gradient, so that neither large nor small gradients overflow, and from deviations rather than
    from E[g^2] - E[g]^2, which cancels in float32. Where the gradient is zero the unit is lost: there `v` is the part
    of the replicas that have a non-zero sample, which is enough to tell "noise without a signal" from "no gradient at
    all".

    Args:
        replica_mean: mean of this replica's samples; with one step, the sample itself.
        gradient: sum of `replica_mean` over the replicas.
        squared_deviations: what `accumulate` returned, or None if the replica has one sample.
        replicas: int, how many replicas there are.
        steps: int, how many samples each replica has.
        dtype: of the share; None for that of the inputs.

    Returns:
        A tensor of the inputs' shape, >= 0, inf where the share is too large for the dtype.
    """
    no_signal = is_zero(gradient)
    unit = tf.where(no_signal, tf.ones_like(gradient), gradient)
    mean = replica_mean * replicas
    share = tf.square((mean - gradient) / unit)
    silent = is_zero(mean)
    if squared_deviations is not None:
        # Divided twice: the square of the unit may underflow where its quotient does not.
        share += squared_deviations * (replicas**2 / steps) / unit / unit
        silent = tf.logical_and(silent, tf.equal(squared_deviations, 0))
    share = tf.where(no_signal, 1 - tf.cast(silent, share.dtype), share) * (1 / replicas)
    return share if dtype is None else tf.cast(share, dtype)


def gsnr(gradient, variance, samples):
    """The gradient signal-to-noise ratio `r`, and where it is defined.

    It is undefined where all samples agree to working precision, which includes the elements that have no
    gradient at all, such as the rows of an embedding that the batch did not touch.

    Args:
        gradient: sum over the replicas of the means of their samples; its scale does not matter.
        variance: `v`, as `relative_variance` defines it.
        samples: int, k.

    Returns:
        `(r, defined)`: `r` >= 0 of the inputs' shape and dtype, 0 where it is undefined, and a bool tensor.
    """
    # Rounding of the mean grows with the number of samples that it sums.
    agreement = (_EPSILON * max(64, samples)) ** 2
    defined = variance > tf.constant(agreement, variance.dtype)
    has_ratio = tf.logical_and(defined, tf.logical_not(is_zero(gradient)))
    r = tf.where(has_ratio, 1 / tf.where(has_ratio, variance, tf.ones_like(variance)), tf.zeros_like(variance))
    return r, defined


def layer_ratio(r, defined, gamma, ratio_max):
    """The ratio that scales the mean gradient: the GSNR against its mean over the layer, within bounds.

    Args:
        r: what `gsnr` returned.
        defined: bool tensor that goes with it.
        gamma: float, lower bound, in (0, 1].
        ratio_max: float, upper bound, >= 1.

    Returns:
        A tensor of the shape and dtype of `r`, in [gamma, ratio_max]. Elements whose GSNR is undefined have ratio
        1, the plain optimizer's step, and do not take part in the mean. Where the mean is zero, all have ratio 1.
    """
    count, mean = total(tf.cast(defined, r.dtype)), total(r)
    mean /= tf.maximum(count, 1)
    usable = tf.logical_not(is_zero(mean))
    ratio = tf.clip_by_value(r * (1 / tf.where(usable, mean, 1)), gamma, ratio_max)
    return tf.where(tf.logical_and(defined, usable), ratio, tf.ones_like(ratio))
