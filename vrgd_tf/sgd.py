"""SGD and Momentum, scaled by the gradient signal-to-noise ratio."""

import keras

from vrgd_tf import rules
from vrgd_tf.arguments import check_decay_rate, documented
from vrgd_tf.optimizer import VROptimizer, decoupled_decay, scaled


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class VRSGD(VROptimizer, keras.optimizers.SGD):
    """Stochastic gradient descent with the gradient scaled by its signal-to-noise ratio.

    With the ratio of `vrgd_tf.gsnr` and the mean gradient `gbar`, both of the variable's shape::

        ghat = ratio * gbar
        w <- w - learning_rate * ghat                         momentum 0
        b <- momentum * b - learning_rate * ghat              otherwise
        w <- w + b,  or  w + momentum * b - learning_rate * ghat  with nesterov

    With `gamma=1` it equals `keras.optimizers.SGD`.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        momentum: float in [0, 1).
        nesterov: bool.{gsnr_arguments}{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown; at the first update, if it has fewer than 2 gradient
            samples (replicas x accumulation steps).

    Example:

    >>> optimizer = vrgd_tf.VRSGD(0.1, momentum=0.9, gradient_accumulation_steps=4)
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer=optimizer, loss="mse")

    References:
        - Jiang et al., arXiv:2309.13681
    """

    hyperparameters = ("momentum", "nesterov")

    def __init__(self, learning_rate=0.01, momentum=0.0, nesterov=False, **kwargs):
        momentum = check_decay_rate("momentum", momentum)
        super().__init__(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **kwargs)

    @classmethod
    def rule(cls, hyper, variable, gradient, ratio, slots, step, *, decays, adapts):
        variable, momentum_buffer = rules.sgd(
            decoupled_decay(variable, step, decays),
            scaled(gradient, ratio),
            slots.get("momentum"),
            step.learning_rate,
            step.finite,
            momentum=hyper.momentum,
            nesterov=hyper.nesterov,
        )
        return variable, {} if momentum_buffer is None else {"momentum": momentum_buffer}


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class VRMomentum(VRSGD):
    """`VRSGD` with momentum 0.9 by default, as the large-batch image recipes use it.

    With `gamma=1` it equals `keras.optimizers.SGD(momentum=0.9)`.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        momentum: float in [0, 1).
        nesterov: bool.{gsnr_arguments}{base_arguments}

    Raises:
        ValueError: as for `VRSGD`.

    Example:

    >>> optimizer = vrgd_tf.VRMomentum(0.1, nesterov=True)

    References:
        - Jiang et al., arXiv:2309.13681
    """

    def __init__(self, learning_rate=0.01, momentum=0.9, nesterov=False, **kwargs):
        super().__init__(learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **kwargs)
