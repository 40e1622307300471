"""Dynamic loss scaling for float16 that sees an infinity on every replica."""

import types

import keras
import numpy as np
import tensorflow as tf

from vrgd_tf import replicas
from vrgd_tf.optimizer import Optimizer

_KerasLossScaleOptimizer = keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable(package="vrgd_tf")
class LossScaleOptimizer(_KerasLossScaleOptimizer):
    """`keras.optimizers.LossScaleOptimizer` around an optimizer of this package, on any number of replicas.

    Keras' own looks at the gradients of the first replica only: an infinity on another one reaches all weights, and
    the scale stays. Here each update looks at the gradients that all replicas share, which costs no message:

    - If they are finite, the update is made; after `dynamic_growth_steps` such updates the scale is doubled.
    - If not, weights and slots stay on every replica, the update counts in `skipped_updates`, and the scale is halved,
      but not below 1 (or `initial_scale`, if that is smaller), so that a run of bad batches does not leave a scale
      from which training cannot recover.

    With `gradient_accumulation_steps` the gradients are looked at, and updates counted, when the steps are complete.

    It need not be named: `model.compile` of a model in "mixed_float16", and `keras.optimizers.LossScaleOptimizer(...)`
    around an optimizer of this package, make this one.

    Args:
        inner_optimizer: an optimizer of this package.
        initial_scale: float, what the loss is first multiplied by.
        dynamic_growth_steps: int, how many finite updates in a row double the scale.
        name: str or None, the optimizer's name.

    Raises:
        ValueError: if `inner_optimizer` is none of this package.

    Example:

    >>> optimizer = vrgd_tf.LossScaleOptimizer(vrgd_tf.VRLAMB(1e-3), initial_scale=1024)
    """

    def __init__(self, inner_optimizer, *args, **kwargs):
        if not isinstance(inner_optimizer, Optimizer):
            raise ValueError(
                "vrgd_tf.LossScaleOptimizer needs an optimizer of vrgd_tf; keras.optimizers.LossScaleOptimizer takes "
                f"others. Received: inner_optimizer={inner_optimizer!r}"
            )
        super().__init__(inner_optimizer, *args, **kwargs)
        # The values to begin with. A namespace, because Keras and TensorFlow would track a dictionary.
        self._start = types.SimpleNamespace(step_counter=0, dynamic_scale=self.initial_scale)

    @property
    def skipped_updates(self):
        """How many updates were skipped because a gradient was not finite: an int64 scalar tensor."""
        return self.inner_optimizer.skipped_updates

    def build(self, var_list):
        """Creates the scale and the variables of the inner optimizer, under the strategy that holds `var_list`."""
        variables = list(var_list)
        self._build_scale(replicas.strategy_of(variables))
        self.inner_optimizer.build(variables)
        self.built = True

    def _build_scale(self, strategy):
        if hasattr(self, "dynamic_scale"):
            return
        with replicas.creation_scope(strategy):
            for name, dtype in (("step_counter", "int32"), ("dynamic_scale", "float32")):
                # Keras' add_variable would count it twice: as a variable and as an attribute.
                variable = keras.Variable(
                    getattr(self._start, name),
                    dtype=dtype,
                    trainable=False,
                    aggregation="only_first_replica",
                    name=name,
                )
                setattr(self, name, variable)

    def _scale(self):
        """The scale, on a replica whose step may be the first to ask for it."""
        replicas.build_once(
            lambda: hasattr(self, "dynamic_scale"), lambda: self._build_scale(tf.distribute.get_strategy())
        )
        return tf.convert_to_tensor(self.dynamic_scale)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss):
        """The loss times the scale; float32 where the loss is of 16 bits."""
        return keras.ops.multiply(loss, self._scale())

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """As `apply` of the inner optimizer, with gradients of the scaled loss."""
        self.inner_optimizer.apply_scaled(grads, trainable_variables, self._scale(), self._next)
        self.built = True

    def _next(self, finite):
        """The variables of the scale, and their values after an update."""
        counter, scale = tf.convert_to_tensor(self.step_counter), tf.convert_to_tensor(self.dynamic_scale)
        grows = counter + 1 >= self.dynamic_growth_steps
        larger = tf.minimum(scale * 2, scale.dtype.max)
        smaller = tf.maximum(scale / 2, min(1.0, self.initial_scale))
        return [self.step_counter, self.dynamic_scale], [
            tf.where(tf.logical_or(grows, tf.logical_not(finite)), 0, counter + 1),
            tf.where(finite, tf.where(grows, larger, scale), smaller),
        ]

    def save_own_variables(self, store):
        """Called by Keras; the inner optimizer saves its own."""
        for name, start in vars(self._start).items():
            store[name] = getattr(self, name).numpy() if hasattr(self, name) else start

    def load_own_variables(self, store):
        """Called by Keras; the inner optimizer loads its own.

        Raises:
            ValueError: if the store is of another optimizer.
        """
        saved, own = sorted(store.keys()), sorted(vars(self._start))
        if not saved:
            return  # Of which the inner optimizer warns.
        if saved != own:
            raise ValueError(
                f"{self.name} restores {own}. Received: state of another optimizer, with the variables {saved[:8]}."
            )
        for name in own:
            setattr(self._start, name, np.asarray(store[name]).item())
            if hasattr(self, name):
                getattr(self, name).assign(getattr(self._start, name))


def _new(cls, inner_optimizer=None, *args, **kwargs):
    if cls is _KerasLossScaleOptimizer and isinstance(inner_optimizer, Optimizer):
        cls = LossScaleOptimizer
    return object.__new__(cls)


# Keras wraps the optimizer of a mixed_float16 model itself, and leaves no other place to say by what.
_KerasLossScaleOptimizer.__new__ = _new
