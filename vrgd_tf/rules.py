"""Update rules: pure functions from tensors to tensors, one for an algorithm. This is what XLA compiles.

Each takes the variable, the gradient, the slots, and hyperparameters; each returns the new variable and the new
slots. Tensors of one call share one shape and one dtype, float32 or float64; `learning_rate` and `step` are scalars of
that dtype. `finite` is a bool scalar, or None for True: where it is False the slots keep their values, and what is
returned for the variable is of no use. Flags and the hyperparameters that stay as they are through a training are
Python values.
"""

import math

import tensorflow as tf

from vrgd_tf.programs import kept, largest, total


def norm(x):
    """Euclidean norm over all elements of `x`, a scalar of its dtype. Their squares have to be within its range."""
    return tf.sqrt(total(tf.square(x)))


def norm_of_any_scale(x):
    """`norm` of gradients, whose squares may leave the range of float32. It costs a pass over `x` more."""
    unit = largest(tf.abs(x))
    unit = tf.where(unit > 0, unit, 1)
    return unit * norm(x / unit)


def is_finite(x):
    """Whether all elements of `x` are finite: a bool scalar."""
    return tf.equal(total(tf.cast(tf.logical_not(tf.math.is_finite(x)), x.dtype)), 0)


def bias_correction(beta, step):
    """`1 - beta^step`, to full precision where `beta` is close to 1."""
    return -tf.math.expm1(step * math.log(beta)) if beta > 0 else tf.ones_like(step)


def moving_average(average, value, beta, finite=None):
    """`beta * average + (1 - beta) * value`."""
    return where_finite(finite, average + (value - average) * (1 - beta), average)


def where_finite(finite, new, old):
    """`old` where `finite` is False. None stands for True.

    A slot takes its final value before the rule goes on with it: to write another value than it computes with costs XLA
    for CPUs a pass over memory for each.
    """
    return new if finite is None else tf.where(finite, new, old)


def divide_count(count, divisor):
    """`(count // divisor, count % divisor)` of an int64 tensor, below 2**48, and a positive Python int.

    A division of 64 bits is 900 operations of a TPU's program. This one is two divisions of 32, by digits of 16 bits.
    """
    if divisor >= 1 << 16:
        return count // divisor, count % divisor
    bits, divisor = 16, tf.constant(divisor, tf.uint32)
    high = tf.cast(tf.bitwise.right_shift(count, bits), tf.uint32)
    low = tf.cast(tf.bitwise.bitwise_and(count, (1 << bits) - 1), tf.uint32)
    high_quotient = high // divisor
    low += tf.bitwise.left_shift(high - high_quotient * divisor, bits)
    low_quotient = low // divisor
    remainder = tf.cast(low - low_quotient * divisor, count.dtype)
    high_quotient, low_quotient = (tf.cast(x, count.dtype) for x in (high_quotient, low_quotient))
    return tf.bitwise.left_shift(high_quotient, bits) + low_quotient, remainder


def sgd(variable, gradient, momentum_buffer, learning_rate, finite=None, *, momentum, nesterov):
    """SGD as Keras defines it; `momentum_buffer` is None where `momentum` is 0."""
    step = learning_rate * gradient
    if momentum_buffer is None:
        return variable - step, None
    momentum_buffer = where_finite(finite, momentum * momentum_buffer - step, momentum_buffer)
    return variable + (momentum * momentum_buffer - step if nesterov else momentum_buffer), momentum_buffer


def adam(variable, gradient, squared, m, v, v_max, learning_rate, step, finite=None, *, beta_1, beta_2, epsilon):
    """Adam as Keras defines it (epsilon outside the bias correction); AMSGrad where `v_max` is not None.

    `squared` is the gradient whose square the second moment averages.
    """
    m = moving_average(m, gradient, beta_1, finite)
    v = moving_average(v, tf.square(squared), beta_2, finite)
    denominator = v
    if v_max is not None:
        denominator = v_max = tf.maximum(v_max, v)
    rate = learning_rate * tf.sqrt(bias_correction(beta_2, step)) / bias_correction(beta_1, step)
    return variable - m * rate / (tf.sqrt(denominator) + epsilon), m, v, v_max


def lars(
    variable,
    gradient,
    momentum_buffer,
    learning_rate,
    weight_decay,
    finite=None,
    *,
    momentum,
    nesterov,
    trust_coefficient,
    adapt,
):
    """LARS (You et al., arXiv:1708.03888, Algorithm 1), with the learning rate inside the momentum buffer.

    `weight_decay` is a scalar or None; `adapt` False leaves the trust ratio at 1.
    """
    decayed = gradient if weight_decay is None else gradient + weight_decay * variable
    if adapt:
        variable_norm, gradient_norm = norm(variable), norm_of_any_scale(gradient)
        scale = gradient_norm if weight_decay is None else gradient_norm + weight_decay * variable_norm
        learning_rate *= _trust_ratio(trust_coefficient * variable_norm, scale, variable_norm, gradient_norm)
    step = learning_rate * decayed
    if momentum_buffer is None:
        return variable - step, None
    momentum_buffer = where_finite(finite, momentum * momentum_buffer + step, momentum_buffer)
    return variable - (momentum * momentum_buffer + step if nesterov else momentum_buffer), momentum_buffer


def lamb(
    variable,
    gradient,
    squared,
    m,
    v,
    learning_rate,
    step,
    weight_decay,
    finite=None,
    *,
    beta_1,
    beta_2,
    epsilon,
    adapt,
):
    """LAMB (You et al., arXiv:1904.00962v5, Algorithm 2), phi the identity, no clamp.

    `squared`, `weight_decay` and `adapt` as in `adam` and `lars`.
    """
    m = moving_average(m, gradient, beta_1, finite)
    v = moving_average(v, tf.square(squared), beta_2, finite)
    m_hat = m * (1 / bias_correction(beta_1, step))
    v_hat = v * (1 / bias_correction(beta_2, step))
    update = m_hat / (tf.sqrt(v_hat) + epsilon)
    if weight_decay is not None:
        update += weight_decay * variable
    if adapt:
        variable_norm, update_norm = norm(variable), norm(update)
        learning_rate *= _trust_ratio(variable_norm, update_norm, variable_norm, update_norm)
        update = kept(update)
    return variable - learning_rate * update, m, v


def _trust_ratio(numerator, denominator, variable_norm, update_norm):
    """The quotient; 1 where a norm is zero, so that a layer of zeros can leave it and one without gradient stays."""
    usable = tf.logical_and(variable_norm > 0, update_norm > 0)
    return tf.where(usable, numerator / tf.where(usable, denominator, 1), 1)
