"""What runs across replicas: the sums, the samples, the writes. The only file that knows `tf.distribute`.

A train step runs in *replica context*: once on each replica, with that replica's gradients. Whatever a replica
computes from summed tensors is the same on all of them, so that writes need no message.

Private names of TensorFlow in use, with the reason:

- `tf.__internal__.distribute.interim.maybe_merge_call` (Keras uses it since 3.0): writes to mirrored variables from
  replica context, on strategies that need a merge call for it and on those that refuse one.
- `tf.__internal__.distribute.strategy_supports_no_merge_call`: the same question for `cond`.
"""

import concurrent.futures
import contextlib
import math

import keras
import numpy as np
import tensorflow as tf

from vrgd_tf import gsnr, programs

# So many bytes of gradients a TPU sums together: what their update uses then fits its on-chip memory.
_GROUP_BYTES = 8 << 20
# So many groups of gradients stay in that memory after a look at them.
_KEPT_GROUPS = 5

_SYNCHRONOUS = "TPUStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, or no strategy at all"
_ASYNCHRONOUS = (tf.distribute.ParameterServerStrategy, tf.distribute.experimental.CentralStorageStrategy)


def check_strategy(strategy):
    """Raises ValueError if the replicas of `strategy` do not apply their gradients together."""
    if isinstance(strategy, _ASYNCHRONOUS):
        raise ValueError(
            "The optimizers of vrgd_tf need a strategy whose replicas update mirrored variables in step: "
            f"{_SYNCHRONOUS}. Received: {type(strategy).__name__}"
        )


def strategy_of(variables):
    """The strategy that holds `variables`; where none does, the current one.

    Raises:
        ValueError: if the strategy is not supported.
    """
    for variable in variables:
        tensor = unwrap(variable)
        if hasattr(tensor, "distribute_strategy"):
            strategy = tensor.distribute_strategy
            break
    else:
        strategy = tf.distribute.get_strategy()
    check_strategy(strategy)
    return strategy


@contextlib.contextmanager
def creation_scope(strategy):
    """Where new variables of `strategy` are created, also when a train step that is being traced asks for them."""
    with tf.init_scope():
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is strategy:
            yield
        else:
            with strategy.scope():
                yield


def is_tpu(strategy):
    """Whether `strategy` compiles the whole step for TPUs."""
    return isinstance(strategy, (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy))


def replica_count():
    """How many replicas the current strategy keeps in sync."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def unwrap(variable):
    """The TensorFlow variable under a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def local_variable(shape, dtype, name):
    """A zero variable whose value may differ from replica to replica; writes to it stay on the replica."""
    return keras.Variable(
        "zeros", shape=shape, dtype=dtype, trainable=False, aggregation="sum", synchronization="on_read", name=name
    )


def outside_steps(function):
    """Calls `function()` eagerly and in cross-replica context, also from a train step that is being traced."""
    if tf.executing_eagerly() and tf.distribute.in_cross_replica_context():
        return function()
    # What a thread is in the midst of does not reach the threads that it starts.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def values_on_replicas(strategy, variables):
    """What each replica holds of local `variables`: a list of arrays [replicas, ...]. Every worker has to call it."""

    def read():
        return [tf.convert_to_tensor(unwrap(variable))[tf.newaxis] for variable in variables]

    values = tf.function(lambda: strategy.run(read), autograph=False)()
    if len(strategy.experimental_local_results(values[0])) < strategy.num_replicas_in_sync:
        return [strategy.gather(value, axis=0).numpy() for value in values]
    return [np.concatenate(strategy.experimental_local_results(value)) for value in values]


def assign_on_replicas(strategy, variables, values):
    """Writes `values`, a list of arrays [replicas, ...], to local `variables`, to each replica its own."""

    def write(values):
        for variable, value in zip(variables, values, strict=True):
            unwrap(variable).assign(value)

    def of_replica(context):
        return [tf.constant(value[context.replica_id_in_sync_group]) for value in values]

    distributed = strategy.experimental_distribute_values_from_function(of_replica)
    tf.function(lambda values: strategy.run(write, args=(values,)), autograph=False)(distributed)


def all_reduce_sum(tensors):
    """The sums of the replicas' `tensors`, a list as long, on every replica."""
    if not tensors:
        return []
    # What is read from a variable inside a conditional has no device, which TensorFlow takes for the destination.
    tensors = [tf.identity(tensor) for tensor in tensors]
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def all_true(condition):
    """Whether a bool scalar is True on all replicas."""
    [failed] = all_reduce_sum([tf.cast(tf.logical_not(condition), tf.float32)])
    return tf.equal(failed, 0)


def assign(variables, values):
    """Writes `values`, which are the same on all replicas, to mirrored `variables`. Called on every replica."""
    variables = [unwrap(variable) for variable in variables]

    def write(strategy, values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,), group=False)

    tf.__internal__.distribute.interim.maybe_merge_call(write, tf.distribute.get_strategy(), values)


def cond(predicate, true_fn, false_fn, args):
    """Calls `true_fn(*args)` or `false_fn(*args)` on every replica; their results are dropped.

    `predicate()` returns a bool scalar that is the same on all replicas. Unlike in a `tf.cond` that stands in a
    train step, the branches may sum across replicas and write to mirrored variables.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _void_cond(predicate(), lambda: true_fn(*args), lambda: false_fn(*args))
        return

    def merged(strategy, *args):
        # TensorFlow forbids a merge call inside a conditional, but not a conditional inside a merge call.
        def on_replicas(fn):
            return lambda: strategy.extended.call_for_each_replica(fn, args=args)

        _void_cond(predicate(), on_replicas(true_fn), on_replicas(false_fn))

    tf.distribute.get_replica_context().merge_call(merged, args=args)


def _void_cond(predicate, true_fn, false_fn):
    def branch(fn):
        def run():
            fn()
            return tf.constant(0)

        return run

    tf.cond(predicate, branch(true_fn), branch(false_fn))


def build_once(is_built, build):
    """Calls `build()` once for all replicas, from a train step whose optimizer has no variables yet."""
    if is_built():
        return
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        build()
        return
    tf.distribute.get_replica_context().merge_call(lambda strategy: None if is_built() else build())


def variance_of_samples(
    replica_means, gradients, squared_deviations, steps, dtype=None, used=None, call=programs.call_uncompiled
):
    """Relative variances of the samples of all replicas.

    Args:
        replica_means: list of tensors, each the mean of this replica's samples.
        gradients: list of tensors, the sums of `replica_means` over the replicas. Losses that are divided by the
            number of replicas make them mean gradients.
        squared_deviations: list as long, of tensors or None; see `gsnr.accumulate`.
        steps: int, samples of one replica.
        dtype: the dtype in which the variances travel between replicas; None for their own.
        used: list of bool, which of the variances are wanted; None for all.
        call: what calls a pure function: `programs.call` or `programs.call_uncompiled`.

    Returns:
        List of tensors of the shapes of `gradients`, the same on every replica, of `dtype` where they travelled; None
        for each that is not wanted.
    """
    indices = [i for i in range(len(gradients)) if used is None or used[i]]
    lists = [[values[i] for i in indices] for values in (replica_means, gradients, squared_deviations)]
    found = dict(zip(indices, _variances(*lists, steps, dtype, call), strict=True))
    return [found.get(i) for i in range(len(gradients))]


def _variances(replica_means, gradients, squared_deviations, steps, dtype, call):
    strategy = tf.distribute.get_strategy()
    static = dict(replicas=strategy.num_replicas_in_sync, steps=steps)
    if not share_memory(strategy):
        return all_reduce_sum(
            [
                call(gsnr.relative_variance, *row, dtype=dtype, **static)
                for row in zip(replica_means, gradients, squared_deviations, strict=True)
            ]
        )

    def merged(strategy, *lists):
        rows = [[_on_each(strategy, x) for x in row] for row in zip(*lists, strict=True)]
        with tf.device(strategy.extended.worker_devices[0]):
            return [call(_sum_of_shares, means, equal[0], others, **static) for means, equal, others in rows]

    return tf.distribute.get_replica_context().merge_call(merged, args=(replica_means, gradients, squared_deviations))


def _on_each(strategy, value):
    """The value on each replica: a list."""
    values = strategy.experimental_local_results(value)
    # TensorFlow makes one of what is the same object on all.
    return list(values) * (strategy.num_replicas_in_sync // len(values))


def _sum_of_shares(means, gradient, deviations, **static):
    return tf.add_n([gsnr.relative_variance(m, gradient, d, **static) for m, d in zip(means, deviations, strict=True)])


def check_in_turn(check, tensors):
    """Whether `check(tensors)` holds on all replicas, looked at in an order that suits XLA for TPUs.

    `reduce_in_turn` begins with the last of them. They are looked at after the others, and are then on the chip.

    Args:
        check: function of a list of tensors that returns a bool scalar.
        tensors: list of tensors.

    Returns:
        `(passed, tensors)`: a bool scalar, the same on all replicas, and what has to take the place of `tensors`.
    """
    start = min((min(group) for group in _groups(tensors)[:_KEPT_GROUPS]), default=0)
    first_passed, last = programs.barrier(check(tensors[:start]), tensors[start:])
    passed = all_true(tf.logical_and(first_passed, check(last)))
    return passed, [*tensors[:start], *last]


def reduce_in_turn(replica_means, squared_deviations, then, before, steps, dtype, used, call):
    """Gradients, variances and what is made of them, in an order that suits XLA for TPUs: one group after the other.

    Left alone, XLA makes one sum of all gradients and one of all variances, so that each goes to HBM and comes back for
    every use, or it spreads a large sum over the chips and collects it again. Here each waits for the one before: the
    gradients of a group, their variances, what follows from them, the gradients of the next group. What a group needs
    is then on the chip. The last variables come first: a backward pass has their gradients first.

    Args:
        replica_means, squared_deviations, steps, dtype, used, call: as for `variance_of_samples`.
        then: function of an index, its gradient, its variance or None, and `before`. It returns a structure of tensors.
        before: structure of tensors that are computed before the first of the sums.

    Returns:
        `(results, before)`: the list of what `then` returned, and what has to take the place of `before`.
    """
    static = dict(replicas=tf.distribute.get_strategy().num_replicas_in_sync, steps=steps, dtype=dtype)
    results, last = [], []
    for group in _groups(replica_means):
        means, before, last = programs.barrier([replica_means[i] for i in group], before, last)
        results += last
        gradients = all_reduce_sum(means)
        statistics = [(means[j], gradients[j], squared_deviations[i]) for j, i in enumerate(group) if used[i]]
        shares = [call(gsnr.relative_variance, *row, **static) for row in statistics]
        shares, gradients = programs.barrier(shares, gradients)
        variances, gradients = programs.barrier(all_reduce_sum(shares), gradients)
        variances = iter(variances)
        variances = [next(variances) if used[i] else None for i in group]
        last = [then(i, *row, before) for i, *row in zip(group, gradients, variances, strict=True)]
    return [*results, *last][::-1], before


def _groups(tensors):
    """Lists of indices of `tensors`, from the last to the first, each of `_GROUP_BYTES` or a little more."""
    groups, size = [], math.inf
    for i in reversed(range(len(tensors))):
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += tensors[i].shape.num_elements() * tensors[i].dtype.size
    return groups


def once(function, *args):
    """`function(*args)` of arguments that are the same on all replicas, computed once where the replicas share memory.

    Those of a MirroredStrategy on CPUs do: what one of them has computed costs the others nothing. `function` returns
    a structure of tensors; it may run in cross-replica context.
    """
    strategy = tf.distribute.get_strategy()
    if not share_memory(strategy):
        return function(*args)

    def merged(strategy, *args):
        with tf.device(strategy.extended.worker_devices[0]):
            return function(*tf.nest.map_structure(lambda x: _on_each(strategy, x)[0], args))

    return tf.distribute.get_replica_context().merge_call(merged, args=args)


def share_memory(strategy):
    """Whether all replicas of `strategy` are CPUs of this process."""
    if strategy.num_replicas_in_sync == 1 or tf.__internal__.distribute.strategy_supports_no_merge_call():
        return False
    devices = [tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices]
    return (
        len(devices) > 1
        and {device.device_type for device in devices} == {"CPU"}
        and len({(device.job, device.replica, device.task) for device in devices}) == 1
    )
