"""LARS, plain and scaled by the gradient signal-to-noise ratio."""

import keras

from vrgd_tf import rules
from vrgd_tf.arguments import check_decay_rate, check_rate, documented
from vrgd_tf.optimizer import LayerAdaptiveOptimizer, VROptimizer, scaled


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class LARS(LayerAdaptiveOptimizer):
    """Layer-wise adaptive rate scaling, on SGD with momentum.

    With the mean gradient `gbar`, the trust coefficient eta, weight decay lambda, Euclidean norms over the variable::

        local = eta * |w| / (|gbar| + lambda * |w|)          1 where |w| or |gbar| is zero
        b <- momentum * b + learning_rate * local * (gbar + lambda * w)
        w <- w - b,  or  w - momentum * b - learning_rate * local * (gbar + lambda * w)  with nesterov

    Args:
        learning_rate: float, schedule, or callable without arguments.
        momentum: float in [0, 1).
        nesterov: bool.
        trust_coefficient: float >= 0, eta.{layer_adaptation_argument}{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown.

    Example:

    >>> optimizer = vrgd_tf.LARS(10.0, weight_decay=1e-4)

    References:
        - You et al., arXiv:1708.03888, Algorithm 1
    """

    hyperparameters = ("momentum", "nesterov", "trust_coefficient")

    def __init__(self, learning_rate=0.01, momentum=0.9, nesterov=False, *, trust_coefficient=0.001, **kwargs):
        momentum = check_decay_rate("momentum", momentum)
        trust_coefficient = check_rate("trust_coefficient", trust_coefficient)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient

    def slot_names(self):
        return super().slot_names() + (["momentum"] if self.momentum else [])

    @classmethod
    def rule(cls, hyper, variable, gradient, ratio, slots, step, *, decays, adapts):
        variable, momentum_buffer = rules.lars(
            variable,
            scaled(gradient, ratio),
            slots.get("momentum"),
            step.learning_rate,
            step.weight_decay if decays else None,
            step.finite,
            momentum=hyper.momentum,
            nesterov=hyper.nesterov,
            trust_coefficient=hyper.trust_coefficient,
            adapt=adapts,
        )
        return variable, {"momentum": momentum_buffer} if hyper.momentum else {}


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class VRLARS(VROptimizer, LARS):
    """`LARS` with the gradient scaled by its signal-to-noise ratio.

    `LARS` on `ghat = ratio * gbar` in place of `gbar`, with the ratio of `vrgd_tf.gsnr`. With `gamma=1` it equals
    `LARS`.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        momentum: float in [0, 1).
        nesterov: bool.
        trust_coefficient: float >= 0, eta.{layer_adaptation_argument}{gsnr_arguments}{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown; at the first update, if it has fewer than 2 gradient
            samples (replicas x accumulation steps).

    Example:

    >>> optimizer = vrgd_tf.VRLARS(10.0, weight_decay=1e-4, gradient_accumulation_steps=4)

    References:
        - Jiang et al., arXiv:2309.13681
        - You et al., arXiv:1708.03888, Algorithm 1
    """

    def __init__(self, learning_rate=0.01, momentum=0.9, nesterov=False, **kwargs):
        super().__init__(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **kwargs)
