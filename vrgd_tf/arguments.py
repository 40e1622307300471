"""The arguments that several optimizers share: what their docstrings say, and checks, which raise ValueError."""

import math
import numbers
import re

SECOND_MOMENTS = ("scaled_gradient", "gradient")
VARIANCE_DTYPES = ("float32", "bfloat16")
JIT_COMPILE_UPDATE = ("auto", True, False)

BASE_ARGUMENTS = """
        weight_decay: float, schedule, callable without arguments, or None: the rate of the weight decay.
        clipnorm, clipvalue, global_clipnorm: float or None. As in Keras, but on the gradient that all replicas share,
            after the reduction.
        use_ema, ema_momentum, ema_overwrite_frequency: the average of the weights. As in Keras, counted in updates.
        loss_scale_factor: float or None, as in Keras.
        gradient_accumulation_steps: int >= 2 or None. Update once in so many steps, from the mean of their gradients.
            A step that does not update sends nothing between replicas.
        exclude_from_weight_decay: list of regular expressions that are searched in `variable.path`; [] excludes
            nothing. {weight_decay_default}
        skip_nonfinite: bool. If True, a NaN or an infinity in any gradient on any replica leaves all weights and slots
            as they are, and counts in `skipped_updates`.
        jit_compile_update: "auto", True or False. Whether XLA compiles the update of each variable. "auto" compiles it
            except under a TPUStrategy, which compiles the whole step.
        name: str or None, the optimizer's name."""

GSNR_ARGUMENTS = """
        gamma: float in (0, 1], the least ratio. At 1, with `ratio_max` 1, this is the plain optimizer.
        ratio_max: float >= 1, the largest ratio. Above 1 it is this implementation's option, not the paper's.
        beta_3: float in [0, 1) or None. If given, the ratio is averaged over updates with it, and corrected for its
            bias, before it scales the gradient.
        exclude_from_gsnr: list of regular expressions that are searched in `variable.path`. Variables that match have
            ratio 1. None, the default, and [] exclude nothing.
        variance_dtype: "float32" or "bfloat16", in which the variances travel between replicas."""

LAYER_ADAPTATION_ARGUMENT = """
        exclude_from_layer_adaptation: list of regular expressions that are searched in `variable.path`; variables that
            match keep trust ratio 1. None, the default, stands for every variable of rank 0 or 1, such as biases and
            the scales of normalisation layers; [] excludes nothing."""

SECOND_MOMENT_ARGUMENT = """
        second_moment: "scaled_gradient" or "gradient", which of ghat and gbar the second moment squares. With ghat, the
            default, most of the ratio cancels between the moments: it changes little on tables and images and helped
            a little on masked language models. With gbar the ratio really shortens the steps of noisy coordinates:
            much better where many coordinates are noise or rare, clearly worse on masked language models; a
            `ratio_max` of 10 enlarges both effects. (Prototypes of this implementation, not the paper's.)"""


def documented(cls):
    """Fills in the arguments that the docstrings of several classes share."""
    decay_default = (
        "None, the default, stands for every variable of rank 0 or 1, as in layer adaptation."
        if "{layer_adaptation_argument}" in (cls.__doc__ or "")
        else "None, the default, excludes nothing either."
    )
    if cls.__doc__ is not None:  # Python removes it under -OO.
        cls.__doc__ = cls.__doc__.format(
            base_arguments=BASE_ARGUMENTS.format(weight_decay_default=decay_default),
            gsnr_arguments=GSNR_ARGUMENTS,
            layer_adaptation_argument=LAYER_ADAPTATION_ARGUMENT,
            second_moment_argument=SECOND_MOMENT_ARGUMENT,
        )
    return cls


def check_number(name, value, expected, holds):
    """Returns `value` as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not holds(value):
        raise ValueError(f"`{name}` must be a number {expected}. Received: {name}={value!r}")
    return float(value)


def check_decay_rate(name, value):
    """Returns `value` as a float."""
    return check_number(name, value, "in [0, 1)", lambda x: 0 <= x < 1)


def check_rate(name, value):
    """Returns `value` as a float."""
    return check_number(name, value, "at least 0 and finite", lambda x: 0 <= x < math.inf)


def check_adam_arguments(beta_1, beta_2, epsilon):
    """Returns the three as floats."""
    return check_decay_rate("beta_1", beta_1), check_decay_rate("beta_2", beta_2), check_rate("epsilon", epsilon)


def check_second_moment(value):
    check_choice("second_moment", value, SECOND_MOMENTS)


def check_choice(name, value, choices):
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}")


def check_patterns(name, patterns):
    """Returns `patterns` as a list, or None."""
    valid = patterns is None or (isinstance(patterns, (list, tuple)) and all(isinstance(p, str) for p in patterns))
    if not valid:
        raise ValueError(f"`{name}` must be None or a list of regular expressions. Received: {name}={patterns!r}")
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`{name}` must hold regular expressions. Received: {pattern!r}, which is none: {error}"
            ) from error
    return None if patterns is None else list(patterns)


def check_base_arguments(learning_rate, arguments):
    """What Keras leaves unchecked among the arguments that all its optimizers take."""
    if isinstance(learning_rate, numbers.Real):
        check_rate("learning_rate", learning_rate)
    if arguments.get("weight_decay") is not None and not callable(arguments["weight_decay"]):
        check_rate("weight_decay", arguments["weight_decay"])
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"):
        if arguments.get(name) is not None:
            check_number(name, arguments[name], "above 0 and finite", lambda x: 0 < x < math.inf)
    steps = arguments.get("gradient_accumulation_steps")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 2):
        raise ValueError(
            "`gradient_accumulation_steps` must be None or an integer >= 2. Received: "
            f"gradient_accumulation_steps={steps!r}"
        )
