"""The shell that all optimizers of this package share: reduce, clip, ratio, rule, assign.

`Optimizer` is a `keras.optimizers.Optimizer` whose update is right under every synchronous `tf.distribute` strategy.
`VROptimizer` adds the gradient signal-to-noise ratio, `LayerAdaptiveOptimizer` what LARS and LAMB have in common.

Private names of Keras in use, all of them the same from Keras 3.10 to 3.15:

- `_filter_empty_gradients`, `_overwrite_variables_directly_with_gradients`: the parts of `Optimizer.apply` that are
  kept. The rest of it is replaced: it divides by the loss scale before sparse gradients are summed, and applies
  constraints with an all-reduce of the weights, in accumulation steps too.
- `_iterations`, `_learning_rate`, `Variable._initialize`, `_distribution_strategy`: an optimizer made outside the
  strategy that holds the model moves into it.
- `_get_current_learning_rate`: schedules count updates, not accumulation steps.
- `_get_variable_index`, `_trainable_variables`: which slot belongs to which variable.
- `_overwrite_variable_with_gradient`: which variables, of float8 training, cannot accumulate.
- `_overwrite_model_variables_with_average_value`: Keras' own assigns float32 averages to 16-bit variables.
"""

import collections
import functools
import math
import re
import types
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

from vrgd_tf import arguments, gsnr, programs, replicas, rules, state


class Step(typing.NamedTuple):
    """The scalars of one update, tensors that are the same on all replicas; None where they are not in use."""

    learning_rate: tf.Tensor
    number: tf.Tensor  # of this update, counted from 1, without the skipped ones
    finite: tf.Tensor | None
    weight_decay: tf.Tensor | None
    gradient_scale: tf.Tensor | None
    overwrite_with_average: tf.Tensor | None

    def cast(self, dtype):
        """The same scalars, the numbers among them in `dtype`."""

        def convert(x):
            return x if x is None or getattr(x, "dtype", None) == tf.bool else tf.cast(x, dtype)

        return Step(*(convert(x) for x in self))


class Optimizer(keras.optimizers.Optimizer):
    """Base class: an optimizer whose update is the same on all replicas of a synchronous strategy.

    A subclass names its slots in `slot_names`, the attributes that its rule depends on in `hyperparameters`, and
    computes its update in `rule`.
    """

    hyperparameters = (
        "clipnorm",
        "clipvalue",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "skip_nonfinite",
        "jit_compile_update",
    )

    def __init__(
        self,
        learning_rate,
        *,
        exclude_from_weight_decay=None,
        skip_nonfinite=True,
        jit_compile_update="auto",
        **kwargs,
    ):
        exclusions = arguments.check_patterns("exclude_from_weight_decay", exclude_from_weight_decay)
        arguments.check_choice("skip_nonfinite", skip_nonfinite, (True, False))
        arguments.check_choice("jit_compile_update", jit_compile_update, arguments.JIT_COMPILE_UPDATE)
        arguments.check_base_arguments(learning_rate, kwargs)
        replicas.check_strategy(tf.distribute.get_strategy())
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.skip_nonfinite = skip_nonfinite
        self.jit_compile_update = jit_compile_update
        self._weight_decay_exclusions = exclusions
        # A namespace, because Keras and TensorFlow would track a dictionary, and save its variables twice.
        self._slots = types.SimpleNamespace()
        self._accumulators = types.SimpleNamespace()
        self._skipped_updates = None
        # By this name tf.train.Checkpoint finds it. What was loaded before `build` waits in the list.
        self._state = state.PythonState(self._saved_state, self._restore_state)
        self._pending_states = ()

    # What a subclass fills in.

    def slot_names(self):
        """Names of the slots that `build` adds to those of the Keras class."""
        return []

    def accumulator_names(self):
        """Names of the statistics that a replica keeps of its samples between the steps of an accumulation."""
        return ["accumulated_mean"]

    @classmethod
    def rule(cls, hyper, variable, gradient, ratio, slots, step, *, decays, adapts):
        """The update rule, a pure function of tensors.

        Args:
            hyper: a named tuple of the `hyperparameters` of all base classes, and `samples`, k.
            variable: the variable's value, float32 or float64.
            gradient: the mean gradient after clipping, of the same shape and dtype.
            ratio: what scales the gradient, of the same shape and dtype, or None for 1.
            slots: dict from slot names to values.
            step: a `Step`, its numbers of the variable's dtype.
            decays: bool, whether weight decay applies to the variable.
            adapts: bool, whether layer adaptation applies to the variable.

        Returns:
            `(variable, slots)` with the new values.
        """
        raise NotImplementedError

    # Variables.

    def samples(self):
        """k, the gradient samples of one update: replicas in sync times accumulation steps."""
        return replicas.replica_count() * (self.gradient_accumulation_steps or 1)

    @property
    def iterations(self):
        """How many updates there were, skipped ones included: an int64 scalar tensor."""
        iterations = tf.convert_to_tensor(self._iterations)
        steps = self.gradient_accumulation_steps
        return self._divided(iterations, steps)[0] if steps else iterations

    @property
    def skipped_updates(self):
        """How many updates were skipped because a gradient was not finite: an int64 scalar tensor."""
        if self._skipped_updates is None:
            return tf.zeros((), tf.int64)
        return tf.convert_to_tensor(self._skipped_updates)

    def add_variable(self, shape, initializer="zeros", dtype=None, *args, **kwargs):
        """As in Keras, but a 16-bit variable is held in float32."""
        return super().add_variable(
            shape, initializer, _arithmetic_dtype(dtype or keras.config.floatx()), *args, **kwargs
        )

    def add_optimizer_variables(self, trainable_variables, name, initializer="zeros"):
        """As in Keras; the update finds the slots by their names."""
        slots = super().add_optimizer_variables(trainable_variables, name, initializer)
        if isinstance(name, str):
            setattr(self._slots, name, slots)
        else:
            vars(self._slots).update(zip(name, slots, strict=True))
        return slots

    def build(self, variables):
        """Creates the optimizer's variables under the strategy that holds `variables`."""
        if self.built:
            return
        variables = list(variables)
        strategy = replicas.strategy_of(variables)
        with replicas.creation_scope(strategy):
            self._move_to(strategy)
            try:
                self._create_variables(variables)
            except Exception:
                # tf.train.Checkpoint restores variables as they are created, and fails with words of its own.
                self._check_pending_states(variables)
                raise
        self._compiled = self.jit_compile_update
        if self._compiled == "auto":
            self._compiled = not replicas.is_tpu(strategy)
        self._call = programs.call if self._compiled else programs.call_uncompiled
        # Replicas that share memory share the values of variables too.
        self._in_place = self._compiled and not replicas.share_memory(strategy)
        self._in_turn = replicas.is_tpu(strategy)
        self._warn_of_unmatched_patterns(variables)
        if self._pending_states:
            replicas.outside_steps(self._restore_pending_states)

    def _create_variables(self, variables):
        steps = self.gradient_accumulation_steps
        # Keras would build mirrored accumulators, which cannot hold another value on every replica.
        self.gradient_accumulation_steps = None
        try:
            super().build(variables)
        finally:
            self.gradient_accumulation_steps = steps
        self._build_slots(variables)
        if steps:
            self._build_accumulators(variables)
        self._skipped_updates = self.add_variable(
            (), dtype="int64", aggregation="only_first_replica", name="skipped_updates"
        )

    def _build_slots(self, variables):
        for name in self.slot_names():
            self.add_optimizer_variables(variables, name)

    def _move_to(self, strategy):
        if strategy is self._distribution_strategy:
            return
        self._distribution_strategy = strategy
        for variable in (self._iterations, self._learning_rate):
            if isinstance(variable, keras.Variable):
                # Another object would be another one in checkpoints, and TensorFlow's lists only grow.
                variable._initialize(variable.numpy())

    def _build_accumulators(self, variables):
        if any(self._overwrite_variable_with_gradient(variable) for variable in variables):
            raise ValueError(
                "gradient_accumulation_steps does not work with variables that their gradients overwrite, such as "
                "those of float8 training. Received: gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, with such a variable among those to train."
            )
        for name in self.accumulator_names():
            column = [
                replicas.local_variable(
                    variable.shape, _arithmetic_dtype(variable.dtype), f"{_path(variable).replace('/', '_')}_{name}"
                )
                for variable in variables
            ]
            setattr(self._accumulators, name, column)

    # One step.

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """Updates the variables, or adds to the accumulated gradients. Called in replica context.

        Args:
            grads: list of gradients of this replica, tensors, `tf.IndexedSlices` or None.
            trainable_variables: list of variables as long. None stands for those that the optimizer was built with.

        Raises:
            ValueError: if no gradient is given for any variable, if a variable is unknown, outside replica context, or
                where the GSNR needs more samples than there are.
        """
        self.apply_scaled(grads, trainable_variables, self.loss_scale_factor)

    def apply_scaled(self, grads, trainable_variables, loss_scale, values_after=None):
        """As `apply`, for gradients of a loss that was multiplied by `loss_scale`.

        Args:
            grads, trainable_variables: as in `apply`.
            loss_scale: float, scalar tensor or variable, or None for 1.
            values_after: function of a bool scalar tensor, whether all gradients of an update are finite, that returns
                variables and the values which they have after it. With it updates that are not finite are skipped
                whatever `skip_nonfinite` is.
        """
        grads = list(grads)
        if not grads:
            return
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "Gradients are applied on each replica: call apply_gradients in the function that strategy.run takes. "
                "Received a call in cross-replica context."
            )
        variables = self._variables_of(grads, trainable_variables)
        self._check_samples()
        with tf.name_scope(self.name):
            grads, variables = self._filter_empty_gradients(grads, variables)
            grads, variables = self._overwrite_variables_directly_with_gradients(grads, variables)
            samples = [self._sample(*pair, loss_scale) for pair in zip(grads, variables, strict=True)]
            if self.gradient_accumulation_steps:
                replicas.cond(
                    lambda: tf.equal(self._accumulated_steps() + 1, self.gradient_accumulation_steps),
                    lambda *samples: self._update(variables, samples, values_after),
                    lambda *samples: self._accumulate(variables, samples),
                    samples,
                )
            else:
                self._update(variables, samples, values_after)
            replicas.assign([self._iterations], [tf.convert_to_tensor(self._iterations) + 1])

    def _variables_of(self, grads, trainable_variables):
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "Gradients without variables need an optimizer that is built. Call optimizer.build(variables) "
                    f"first, or pass the variables. Received: {len(grads)} gradients."
                )
            trainable_variables = self._trainable_variables
        trainable_variables = list(trainable_variables)
        if len(grads) != len(trainable_variables):
            raise ValueError(
                "Expected one gradient for each variable. Received: "
                f"{len(grads)} gradients for {len(trainable_variables)} variables."
            )
        replicas.build_once(lambda: self.built, lambda: self.build(trainable_variables))
        known = {id(variable) for variable in self._trainable_variables}
        unknown = [_path(variable) for variable in trainable_variables if id(variable) not in known]
        if unknown:
            raise ValueError(
                f"Unknown variables: {', '.join(unknown)}. {self.name} was built for "
                f"{', '.join(_path(variable) for variable in self._trainable_variables)}. Make a new optimizer for "
                "others, or build it with all variables that it will ever train."
            )
        return trainable_variables

    def _check_samples(self):
        """Raises ValueError where an update has too few samples; called when a step is traced."""

    def _sample(self, gradient, variable, loss_scale):
        """One sample: dense, in the dtype of the arithmetic, without the loss scale."""
        gradient, dtype = tf.convert_to_tensor(gradient), _arithmetic_dtype(variable.dtype)
        if loss_scale is None and gradient.dtype == dtype:
            return gradient
        scale = None if loss_scale is None else tf.cast(loss_scale, dtype)
        return self._call(_unscaled, gradient, scale, dtype=dtype)

    def _accumulated_steps(self):
        return self._divided(tf.convert_to_tensor(self._iterations), self.gradient_accumulation_steps)[1]

    def _divided(self, count, divisor):
        """Quotient and remainder of a count."""
        # A GPU divides 64 bits, and has no division of 32 unsigned ones.
        tpu = replicas.is_tpu(self._distribution_strategy)
        return rules.divide_count(count, divisor) if tpu else (count // divisor, count % divisor)

    def _accumulate(self, variables, samples):
        for variable, sample in zip(variables, samples, strict=True):
            columns, values = self._accumulated(self._get_variable_index(variable), sample)
            if not self._compiled:
                for column, value in zip(columns, values, strict=True):
                    column.assign(value)

    def _accumulated(self, index, sample):
        """A variable's accumulators, and their values with one more sample, which compiled ones have already."""
        columns = [replicas.unwrap(column[index]) for column in vars(self._accumulators).values()]
        if self._compiled:
            programs.update(_accumulated, columns, sample, self._accumulated_steps())
            return columns, [tf.convert_to_tensor(column) for column in columns]
        old = [tf.convert_to_tensor(column) for column in columns]
        return columns, _accumulated(old, sample, self._accumulated_steps())

    def _update(self, variables, samples, values_after):
        indices = [self._get_variable_index(variable) for variable in variables]
        means, deviations = samples, [None] * len(samples)
        if self.gradient_accumulation_steps:
            statistics = [self._accumulated(*pair)[1] for pair in zip(indices, samples, strict=True)]
            means, deviations = zip(*[(*row, None)[:2] for row in statistics], strict=True)
        reduction = dict(
            steps=self.gradient_accumulation_steps or 1,
            dtype=self._variance_dtype(),
            used=[self._uses_gsnr(variable) for variable in variables],
            call=self._call,
        )
        hyper = self._hyperparameters()
        updates = [self._targets_of(*pair, hyper) for pair in zip(variables, indices, strict=True)]
        update = self._update_in_turn if self._in_turn else self._update_together
        skip = self.skip_nonfinite or values_after is not None
        finite, targets, values = update(updates, list(means), list(deviations), skip, reduction)
        if finite is not None:
            targets.append(self._skipped_updates)
            values.append(self.skipped_updates + tf.cast(tf.logical_not(finite), tf.int64))
        if values_after is not None:
            more_targets, more_values = values_after(finite)
            targets += more_targets
            values += more_values
        replicas.assign(targets, values)

    def _targets_of(self, variable, index, hyper):
        """What an update of a variable writes, and the Python values that it depends on."""
        slots = {name: column[index] for name, column in vars(self._slots).items() if column[index] is not None}
        static = dict(hyper=hyper, decays=self._decays(variable), adapts=self._adapts(variable))
        # A constraint is the user's code, which XLA may not be able to compile.
        static["constraint"] = getattr(variable, "constraint", None)
        return tf.nest.map_structure(replicas.unwrap, (variable, slots)), static

    def _update_together(self, updates, means, deviations, skip, reduction):
        """Sums all, then updates all.

        Returns:
            `(finite, targets, values)`: whether all gradients are finite, None where `skip` is False, and what is not
            written yet.
        """
        gradients = replicas.all_reduce_sum(means)
        variances = replicas.variance_of_samples(means, gradients, deviations, **reduction)
        step = self._step(
            *replicas.once(lambda *x: (self._finite(x) if skip else None, self._gradient_scale(x)), *gradients)
        )
        left = []
        for (targets, static), *tensors in zip(updates, gradients, variances, strict=True):
            if self._in_place and static["constraint"] is None:
                programs.update(self._new_values, targets, *tensors, step, **static)
            else:
                left.append((targets, tensors, static))
        targets = [targets for targets, *_ in left]
        values = replicas.once(
            functools.partial(self._new_values_of_all, [static for *_, static in left]),
            tf.nest.map_structure(tf.convert_to_tensor, targets),
            [tensors for _, tensors, _ in left],
            step,
        )
        return step.finite, tf.nest.flatten(targets), values

    def _update_in_turn(self, updates, means, deviations, skip, reduction):
        """The same in the order that suits a TPU."""
        finite = None
        if skip:
            # The sums would tell it too, but then all of them had to be there before the first update.
            count = self.samples() // reduction["steps"]
            finite, means = replicas.check_in_turn(lambda means: self._finite([mean * count for mean in means]), means)
        targets = [targets for targets, _ in updates]

        def new_values(i, gradient, variance, step):
            old = tf.nest.map_structure(tf.convert_to_tensor, [targets[i]])
            with programs.within_tpu_program():
                return self._new_values_of_all([updates[i][1]], old, [(gradient, variance)], step)

        step = self._step(finite, None)
        if self.global_clipnorm is None:
            values, step = replicas.reduce_in_turn(means, deviations, new_values, step, **reduction)
        else:
            reduced, step = replicas.reduce_in_turn(means, deviations, lambda i, *row: row[:2], step, **reduction)
            step = step._replace(gradient_scale=self._gradient_scale([gradient for gradient, _ in reduced]))
            values = [new_values(i, *row, step) for i, row in enumerate(reduced)]
        return step.finite, tf.nest.flatten(targets), tf.nest.flatten(values)

    def _uses_gsnr(self, variable):
        return False

    def _variance_dtype(self):
        """The dtype in which variances travel; None for their own."""
        return None

    def _finite(self, tensors):
        return tf.reduce_all(tf.convert_to_tensor([self._call(rules.is_finite, tensor) for tensor in tensors], tf.bool))

    def _gradient_scale(self, gradients):
        if self.global_clipnorm is None:
            return None
        norms = [tf.cast(self._call(rules.norm_of_any_scale, gradient), tf.float32) for gradient in gradients]
        norm = rules.norm_of_any_scale(tf.stack(norms))
        return self.global_clipnorm / tf.maximum(norm, self.global_clipnorm)

    def _configured(self):
        return {
            name: getattr(self, name) for cls in type(self).__mro__ for name in vars(cls).get("hyperparameters", ())
        }

    def _hyperparameters(self):
        values = self._configured() | {"samples": self.samples()}
        return collections.namedtuple("Hyperparameters", values)(**values)

    @classmethod
    def _ratio(cls, hyper, gradient, variance, slots, step):
        """The ratio that scales a gradient, None for 1, and the new values of the slots that it keeps."""
        return None, {}

    def _step(self, finite, gradient_scale):
        iterations = self.iterations
        return Step(
            learning_rate=tf.convert_to_tensor(self.learning_rate),
            number=iterations + 1 - self.skipped_updates,
            finite=finite,
            weight_decay=self._current_weight_decay(),
            gradient_scale=gradient_scale,
            overwrite_with_average=(
                tf.equal(self._divided(iterations + 1, self.ema_overwrite_frequency)[1], 0)
                if self.use_ema and self.ema_overwrite_frequency
                else None
            ),
        )

    @classmethod
    def _new_values(cls, values, gradient, variance, step, *, hyper, decays, adapts, constraint):
        """The new values of one variable and of its slots: all arithmetic of an update after the reductions."""
        variable, slots = values
        dtype = gradient.dtype
        step = step.cast(dtype)
        old = tf.cast(variable, dtype)
        ratio, new_slots = cls._ratio(hyper, gradient, variance, slots, step)
        gradient = cls._clip(hyper, gradient, step)
        new, rule_slots = cls.rule(hyper, old, gradient, ratio, slots, step, decays=decays, adapts=adapts)
        new_slots |= rule_slots
        if hyper.use_ema:
            average = tf.where(step.number <= 1, new, rules.moving_average(slots["average"], new, hyper.ema_momentum))
            new_slots["average"] = average = rules.where_finite(step.finite, average, slots["average"])
            if step.overwrite_with_average is not None:
                new = tf.where(step.overwrite_with_average, average, new)
        new = tf.cast(new, variable.dtype)
        if constraint is not None:
            new = constraint(new)
        return rules.where_finite(step.finite, new, variable), {name: new_slots[name] for name in slots}

    def _new_values_of_all(self, statics, values, tensors, step):
        """The new values of many variables, in one list."""
        results = []
        for static, old, row in zip(statics, values, tensors, strict=True):
            call = self._call if static["constraint"] is None else programs.call_uncompiled
            results += tf.nest.flatten(call(self._new_values, old, *row, step, **static))
        return results

    @staticmethod
    def _clip(hyper, gradient, step):
        if hyper.clipvalue is not None:
            return tf.clip_by_value(gradient, -hyper.clipvalue, hyper.clipvalue)
        if hyper.clipnorm is not None:
            return gradient * (hyper.clipnorm / tf.maximum(rules.norm_of_any_scale(gradient), hyper.clipnorm))
        if step.gradient_scale is not None:
            return gradient * step.gradient_scale
        return gradient

    def _current_weight_decay(self):
        decay = self.weight_decay
        if isinstance(decay, keras.optimizers.schedules.LearningRateSchedule):
            decay = decay(self.iterations)
        elif callable(decay):
            decay = decay()
        return None if decay is None else tf.cast(decay, tf.float32)

    def _get_current_learning_rate(self):
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        for variable, average in zip(trainable_variables, self._slots.average, strict=True):
            if average is not None:
                replicas.unwrap(variable).assign(tf.cast(tf.convert_to_tensor(average), variable.dtype))

    # State.

    @property
    def variables(self):
        """List of all variables of the optimizer; those that accumulate differ from replica to replica."""
        return super().variables + [slot for column in vars(self._accumulators).values() for slot in column]

    def save_own_variables(self, store):
        """Called by Keras when it saves a model or its weights."""
        for key, variable in self._named_variables().items():
            store[key] = variable.numpy()
        for key, array in self._saved_state().items():
            store[key] = array

    def load_own_variables(self, store):
        """Called by Keras when it loads a model or its weights.

        Raises:
            ValueError: if what was saved does not fit this optimizer, which then stays as it was. Where the optimizer
                is not built yet, its variables are restored, and their shapes checked, when it is.
        """
        arrays = {key: np.asarray(store[key]) for key in list(store.keys())}
        if not arrays:
            warnings.warn(f"The file holds no state of an optimizer; {self.name} keeps its own.", stacklevel=2)
            return
        self._restore_state(arrays)

    def _named_variables(self):
        """Dict from keys in files to variables, without the accumulators."""
        slots = {
            f"{name}_{i}": slot
            for name, column in vars(self._slots).items()
            for i, slot in enumerate(column)
            if slot is not None
        }
        others = {id(variable) for variable in slots.values()}
        return slots | {variable.name: variable for variable in super().variables if id(variable) not in others}

    def _describe_state(self):
        return {
            "rule": self.rule.__qualname__.rsplit(".", 1)[0],
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "exclusions": self._exclusions(),
            "learning_rate": "a variable" if isinstance(self._learning_rate, keras.Variable) else "a schedule",
            "variables": [(_path(variable), list(variable.shape)) for variable in self._trainable_variables]
            if self.built
            else [],
            "slots": {
                name: [i for i, slot in enumerate(column) if slot is not None]
                for name, column in vars(self._slots).items()
            },
        }

    def _saved_state(self):
        """The state in arrays, without the variables that `_named_variables` holds. Every worker has to call it."""
        return replicas.outside_steps(self._collect_state)  # tf.saved_model.save asks for it in a graph.

    def _collect_state(self):
        steps = int(self._accumulated_steps()) if self.built and self.gradient_accumulation_steps else 0
        accumulators = vars(self._accumulators) if steps else {}
        arrays = {}
        for name, column in accumulators.items():
            values = replicas.values_on_replicas(self._distribution_strategy, column)
            arrays |= {f"{name}_{i}": value for i, value in enumerate(values)}
        return state.with_description(self._describe_state() | {"accumulated_steps": steps}, arrays)

    def _restore_state(self, arrays):
        saved = state.description_of(arrays)
        if saved is None:
            raise ValueError(
                f"{self.name} restores what a {type(self).__name__} saved. Received: state of another optimizer, with "
                f"the variables {', '.join(sorted(arrays)[:8])}. Where these are dynamic_scale and step_counter, the "
                "saved optimizer was in a LossScaleOptimizer, as a model in mixed_float16 puts it: wrap this one too, "
                'by keras.config.set_dtype_policy("mixed_float16") before load_model. To load nothing but the weights '
                "of the model, pass skip_mismatch=True to load_weights, or compile=False to load_model."
            )
        in_file = self._iterations.name in arrays
        if not in_file and saved["learning_rate"] != (own := self._describe_state()["learning_rate"]):
            # tf.train.Checkpoint restores the variables itself, by their order, in which this is the second.
            raise ValueError(
                f"tf.train.Checkpoint cannot restore {self.name}, whose learning rate is {own}, from one whose rate "
                f"was {saved['learning_rate']}. Use save_weights and load_weights, which can."
            )
        self._check_state(saved)
        if self.built:
            self._assign_state(saved, arrays)
            return
        self._pending_states += ((saved, arrays),)
        if in_file:  # Asked for before the optimizer is built, to know where to go on.
            self._iterations.assign(arrays[self._iterations.name])

    def _restore_pending_states(self):
        try:
            for saved, arrays in self._pending_states:
                self._check_state(saved)
                self._assign_state(saved, arrays)
        except ValueError:
            self.built = False
            raise
        self._pending_states = ()

    def _check_pending_states(self, variables):
        """Raises ValueError if what was loaded does not fit the optimizer that `build(variables)` would give."""
        self.built = False
        if self._pending_states:
            other = type(self).from_config(self.get_config())
            other.build(variables)
            for saved, _ in self._pending_states:
                other._check_state(saved)

    def _check_state(self, saved):
        found = state.differences(saved, self._describe_state())
        if found:
            raise ValueError(
                f"The saved state does not fit {self.name} ({type(self).__name__}), and none of it is restored: "
                f"{'; '.join(found)}."
            )
        for name, patterns in self._exclusions().items():
            if saved["exclusions"].get(name) != patterns:
                warnings.warn(
                    f"The saved state is of an optimizer with {name}={saved['exclusions'].get(name)}. {self.name} "
                    f"goes on with its own: {patterns}",
                    stacklevel=2,
                )

    def _assign_state(self, saved, arrays):
        # tf.train.Checkpoint restores the variables itself.
        in_file = self._iterations.name in arrays
        for key, variable in self._named_variables().items():
            if key in arrays:
                variable.assign(arrays[key])
            elif in_file and not saved["variables"] and variable is not self._learning_rate:
                # Saved before it was built, when all of these would have been zero.
                variable.assign(np.zeros(variable.shape))
        steps = saved["accumulated_steps"]
        if steps:
            self._assign_accumulators(steps, arrays)

    def _assign_accumulators(self, steps, arrays):
        strategy = self._distribution_strategy
        count = strategy.num_replicas_in_sync
        columns = [
            [arrays[f"{name}_{i}"] for i in range(len(column))] for name, column in vars(self._accumulators).items()
        ]
        saved_count = len(columns[0][0])
        if saved_count != count:
            warnings.warn(
                f"The saved state is of {saved_count} replicas with {steps} of {self.gradient_accumulation_steps} "
                f"accumulation steps done. {self.name} has {count}: what was accumulated is merged, and counts as "
                f"{steps} steps of each.",
                stacklevel=2,
            )
            means, deviations = columns if len(columns) == 2 else (*columns, [None] * len(columns[0]))
            merged = [state.merge(m, d, steps, count) for m, d in zip(means, deviations, strict=True)]
            columns = list(zip(*merged, strict=True))[: len(columns)]
        replicas.assign_on_replicas(
            strategy,
            [slot for column in vars(self._accumulators).values() for slot in column],
            [value for column in columns for value in column],
        )

    # Exclusions.

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from weight decay, in place of what the argument of the same name said.

        Args:
            var_list: list of variables.
            var_names: list of regular expressions that are searched in the variables' names.
        """
        if self.built:
            raise ValueError("exclude_from_weight_decay must be called before the optimizer is built.")
        patterns = [f"^{re.escape(_path(variable))}$" for variable in var_list or ()]
        patterns += [f"(^|/)[^/]*({name})[^/]*$" for name in var_names or ()]
        self._weight_decay_exclusions = arguments.check_patterns("var_names", patterns)

    def _exclusions(self):
        """Dict from argument names to lists of patterns."""
        return {"exclude_from_weight_decay": self._weight_decay_exclusions}

    def _decays(self, variable):
        return bool(self.weight_decay) and not _matches(self._weight_decay_exclusions, variable)

    def _adapts(self, variable):
        return False

    def _warn_of_unmatched_patterns(self, variables):
        for argument, patterns in self._exclusions().items():
            for pattern in patterns or ():
                if not any(_matches([pattern], variable) for variable in variables):
                    warnings.warn(
                        f"{argument} of {self.name}: the pattern {pattern!r} matches no variable. The variables are: "
                        f"{', '.join(_path(variable) for variable in variables)}",
                        stacklevel=2,
                    )

    def get_config(self):
        config = super().get_config() | self._configured()
        config |= {name: patterns if patterns is None else [*patterns] for name, patterns in self._exclusions().items()}
        if callable(self.weight_decay):
            config["weight_decay"] = keras.saving.serialize_keras_object(self.weight_decay)
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        if isinstance(config.get("weight_decay"), dict):
            decay = keras.saving.deserialize_keras_object(config["weight_decay"], custom_objects=custom_objects)
            config = config | {"weight_decay": decay}
        return super().from_config(config, custom_objects)


class VROptimizer(Optimizer):
    """Adds the ratio to an optimizer: its gradient is scaled by it. First among the base classes of such a class."""

    hyperparameters = ("gamma", "ratio_max", "beta_3", "variance_dtype")

    def __init__(
        self, *, gamma=0.1, ratio_max=1.0, beta_3=None, exclude_from_gsnr=None, variance_dtype="float32", **kwargs
    ):
        gamma = arguments.check_number("gamma", gamma, "in (0, 1]", lambda x: 0 < x <= 1)
        ratio_max = arguments.check_number("ratio_max", ratio_max, "at least 1 and finite", lambda x: 1 <= x < math.inf)
        beta_3 = beta_3 if beta_3 is None else arguments.check_decay_rate("beta_3", beta_3)
        exclude_from_gsnr = arguments.check_patterns("exclude_from_gsnr", exclude_from_gsnr)
        arguments.check_choice("variance_dtype", variance_dtype, arguments.VARIANCE_DTYPES)
        super().__init__(**kwargs)
        self.gamma = gamma
        self.ratio_max = ratio_max
        self.beta_3 = beta_3
        self.variance_dtype = variance_dtype
        self.exclude_from_gsnr = exclude_from_gsnr
        self._warned_of_few_samples = False

    def _build_slots(self, variables):
        super()._build_slots(variables)
        if self.beta_3 is not None:
            self._slots.ratio_average = [
                self.add_variable_from_reference(variable, "ratio_average") if self._uses_gsnr(variable) else None
                for variable in variables
            ]

    def accumulator_names(self):
        return [*super().accumulator_names(), "accumulated_deviations"]

    def _check_samples(self):
        samples = self.samples()
        if samples < 2:
            raise ValueError(
                f"{type(self).__name__} measures the variance of the gradient over its samples, one for each replica "
                "and accumulation step, and needs at least 2 of them. Received: 1 replica without accumulation. Train "
                "under a strategy with 2 or more replicas, or set gradient_accumulation_steps to 2 or more; 4 samples "
                "or more are recommended."
            )
        if samples < 4 and not self._warned_of_few_samples:
            self._warned_of_few_samples = True
            warnings.warn(
                f"{type(self).__name__} has {samples} gradient samples in each update. With so few, most ratios of a "
                f"large layer are {'nearly all' if samples == 2 else 'half'} at gamma, whatever the gradient; use 4 or "
                "more (replicas x gradient_accumulation_steps).",
                stacklevel=2,
            )

    def _uses_gsnr(self, variable):
        return not _matches(self.exclude_from_gsnr, variable)

    def _variance_dtype(self):
        return None if self.variance_dtype == "float32" else self.variance_dtype

    @classmethod
    def _ratio(cls, hyper, gradient, variance, slots, step):
        if variance is None:
            return None, {}
        r, defined = gsnr.gsnr(gradient, tf.cast(variance, gradient.dtype), hyper.samples)
        ratio = gsnr.layer_ratio(r, defined, hyper.gamma, hyper.ratio_max)
        if hyper.beta_3 is None:
            return ratio, {}
        average = rules.moving_average(slots["ratio_average"], ratio, hyper.beta_3, step.finite)
        return average * (1 / rules.bias_correction(hyper.beta_3, step.number)), {"ratio_average": average}

    def _exclusions(self):
        return super()._exclusions() | {"exclude_from_gsnr": self.exclude_from_gsnr}


class LayerAdaptiveOptimizer(Optimizer):
    """What LARS and LAMB share: weight decay inside the trust ratio, and variables that have neither."""

    def __init__(self, *, exclude_from_layer_adaptation=None, **kwargs):
        exclude_from_layer_adaptation = arguments.check_patterns(
            "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        super().__init__(**kwargs)
        self.exclude_from_layer_adaptation = exclude_from_layer_adaptation

    def _decays(self, variable):
        if self._weight_decay_exclusions is None and _is_vector(variable):
            return False
        return super()._decays(variable)

    def _adapts(self, variable):
        if self.exclude_from_layer_adaptation is None:
            return not _is_vector(variable)
        return not _matches(self.exclude_from_layer_adaptation, variable)

    def _exclusions(self):
        return super()._exclusions() | {"exclude_from_layer_adaptation": self.exclude_from_layer_adaptation}


def _accumulated(statistics, sample, count):
    """`gsnr.accumulate` for a list of the mean, or of the mean and the squared deviations."""
    mean, deviations = (*statistics, None)[:2]
    return list(gsnr.accumulate(sample, mean, deviations, count))[: len(statistics)]


def _unscaled(gradient, loss_scale, *, dtype):
    gradient = tf.cast(gradient, dtype)
    return gradient if loss_scale is None else gradient / loss_scale


def decoupled_decay(variable, step, decays):
    """`variable` after decoupled weight decay, as Keras applies it, before the update."""
    return variable - variable * (step.weight_decay * step.learning_rate) if decays else variable


def scaled(gradient, ratio):
    """The gradient times its ratio; None is ratio 1."""
    return gradient if ratio is None else gradient * ratio


def _arithmetic_dtype(dtype):
    dtype = keras.backend.standardize_dtype(dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _path(variable):
    return getattr(variable, "path", variable.name)


def _is_vector(variable):
    return len(variable.shape) <= 1


def _matches(patterns, variable):
    return any(re.search(pattern, _path(variable)) for pattern in patterns or ())
