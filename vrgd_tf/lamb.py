"""LAMB, plain and scaled by the gradient signal-to-noise ratio."""

import keras

from vrgd_tf import rules
from vrgd_tf.arguments import check_adam_arguments, check_second_moment, documented
from vrgd_tf.optimizer import LayerAdaptiveOptimizer, VROptimizer, scaled


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class LAMB(LayerAdaptiveOptimizer):
    """Layer-wise adaptive moments, with weight decay inside the trust ratio.

    With the mean gradient `gbar`, weight decay lambda, Euclidean norms over the variable, and update number t::

        m <- beta_1 * m + (1 - beta_1) * gbar                mhat = m / (1 - beta_1^t)
        v <- beta_2 * v + (1 - beta_2) * gbar^2              vhat = v / (1 - beta_2^t)
        u = mhat / (sqrt(vhat) + epsilon) + lambda * w
        w <- w - learning_rate * |w| / |u| * u               the quotient is 1 where |w| or |u| is zero

    Without weight decay and with the same epsilon it equals `keras.optimizers.Lamb`, which decays outside the trust
    ratio.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        beta_1: float in [0, 1), decay rate of the first moment.
        beta_2: float in [0, 1), decay rate of the second moment.
        epsilon: float >= 0, added to the root of the second moment.{layer_adaptation_argument}{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown.

    Example:

    >>> optimizer = vrgd_tf.LAMB(1e-3, weight_decay=0.01)

    References:
        - You et al., arXiv:1904.00962v5, Algorithm 2
    """

    hyperparameters = ("beta_1", "beta_2", "epsilon")

    def __init__(self, learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-6, **kwargs):
        beta_1, beta_2, epsilon = check_adam_arguments(beta_1, beta_2, epsilon)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def slot_names(self):
        return [*super().slot_names(), "momentum", "velocity"]

    @staticmethod
    def squared_gradient(hyper, gradient, scaled_gradient):
        """The gradient whose square the second moment averages."""
        return scaled_gradient

    @classmethod
    def rule(cls, hyper, variable, gradient, ratio, slots, step, *, decays, adapts):
        scaled_gradient = scaled(gradient, ratio)
        variable, m, v = rules.lamb(
            variable,
            scaled_gradient,
            cls.squared_gradient(hyper, gradient, scaled_gradient),
            slots["momentum"],
            slots["velocity"],
            step.learning_rate,
            step.number,
            step.weight_decay if decays else None,
            step.finite,
            beta_1=hyper.beta_1,
            beta_2=hyper.beta_2,
            epsilon=hyper.epsilon,
            adapt=adapts,
        )
        return variable, {"momentum": m, "velocity": v}


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class VRLAMB(VROptimizer, LAMB):
    """`LAMB` with the gradient scaled by its signal-to-noise ratio.

    `LAMB` on `ghat` in place of `gbar`, with the ratio of `vrgd_tf.gsnr` and update number t::

        p <- beta_3 * p + (1 - beta_3) * ratio               phat = p / (1 - beta_3^t)
        ghat = phat * gbar

    With `gamma=1` it equals `LAMB`.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        beta_1: float in [0, 1), decay rate of the first moment.
        beta_2: float in [0, 1), decay rate of the second moment.
        epsilon: float >= 0, added to the root of the second moment.{second_moment_argument}\
{layer_adaptation_argument}{gsnr_arguments}{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown; at the first update, if it has fewer than 2 gradient
            samples (replicas x accumulation steps).

    Example:

    >>> optimizer = vrgd_tf.VRLAMB(1e-3, weight_decay=0.01, gradient_accumulation_steps=4)

    References:
        - Jiang et al., arXiv:2309.13681
        - You et al., arXiv:1904.00962v5, Algorithm 2
    """

    hyperparameters = ("second_moment",)

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        *,
        second_moment="scaled_gradient",
        beta_3=0.9,
        **kwargs,
    ):
        check_second_moment(second_moment)
        super().__init__(
            learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, beta_3=beta_3, **kwargs
        )
        self.second_moment = second_moment

    @staticmethod
    def squared_gradient(hyper, gradient, scaled_gradient):
        return gradient if hyper.second_moment == "gradient" else scaled_gradient
