"""Adam, scaled by the gradient signal-to-noise ratio."""

import keras

from vrgd_tf import rules
from vrgd_tf.arguments import check_adam_arguments, check_second_moment, documented
from vrgd_tf.optimizer import VROptimizer, decoupled_decay, scaled


@documented
@keras.saving.register_keras_serializable(package="vrgd_tf")
class VRAdam(VROptimizer, keras.optimizers.Adam):
    """Adam with the gradient scaled by its signal-to-noise ratio.

    With the ratio of `vrgd_tf.gsnr`, the mean gradient `gbar`, both of the variable's shape, and update number t::

        p <- beta_3 * p + (1 - beta_3) * ratio               phat = p / (1 - beta_3^t)
        ghat = phat * gbar
        m <- beta_1 * m + (1 - beta_1) * ghat
        v <- beta_2 * v + (1 - beta_2) * ghat^2              or gbar^2, see second_moment
        w <- w - learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    Weight decay is decoupled, as in `keras.optimizers.AdamW`. With `gamma=1` it equals `keras.optimizers.Adam`.

    Args:
        learning_rate: float, schedule, or callable without arguments.
        beta_1: float in [0, 1), decay rate of the first moment.
        beta_2: float in [0, 1), decay rate of the second moment.
        epsilon: float >= 0, added to the root of the second moment.
        amsgrad: bool, whether to use the largest second moment so far.{second_moment_argument}{gsnr_arguments}\
{base_arguments}

    Raises:
        ValueError: for an argument out of its range or unknown; at the first update, if it has fewer than 2 gradient
            samples (replicas x accumulation steps).

    Example:

    >>> optimizer = vrgd_tf.VRAdam(1e-3, gradient_accumulation_steps=4)

    References:
        - Jiang et al., arXiv:2309.13681
        - Kingma and Ba, arXiv:1412.6980
    """

    hyperparameters = ("beta_1", "beta_2", "epsilon", "amsgrad", "second_moment")

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        amsgrad=False,
        *,
        second_moment="scaled_gradient",
        beta_3=0.9,
        **kwargs,
    ):
        beta_1, beta_2, epsilon = check_adam_arguments(beta_1, beta_2, epsilon)
        check_second_moment(second_moment)
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            beta_3=beta_3,
            **kwargs,
        )
        self.second_moment = second_moment

    @classmethod
    def rule(cls, hyper, variable, gradient, ratio, slots, step, *, decays, adapts):
        scaled_gradient = scaled(gradient, ratio)
        variable, m, v, v_max = rules.adam(
            decoupled_decay(variable, step, decays),
            scaled_gradient,
            scaled_gradient if hyper.second_moment == "scaled_gradient" else gradient,
            slots["momentum"],
            slots["velocity"],
            slots.get("velocity_hat"),
            step.learning_rate,
            step.number,
            step.finite,
            beta_1=hyper.beta_1,
            beta_2=hyper.beta_2,
            epsilon=hyper.epsilon,
        )
        return variable, {"momentum": m, "velocity": v} | ({} if v_max is None else {"velocity_hat": v_max})
