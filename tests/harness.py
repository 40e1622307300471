"""Runs an optimizer on given gradient samples, in graph mode, under a strategy of logical CPU devices."""

import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

import vrgd_tf

# One table drives the tests of all optimizers: class, its arguments, and the same for the reference.
OPTIMIZERS = {
    "VRSGD": (vrgd_tf.VRSGD, dict(learning_rate=0.05), dict(rule="sgd")),
    "VRMomentum": (
        vrgd_tf.VRMomentum,
        dict(learning_rate=0.05, nesterov=True, weight_decay=0.1),
        dict(rule="sgd", momentum=0.9),
    ),
    "VRAdam": (
        vrgd_tf.VRAdam,
        dict(learning_rate=0.05, amsgrad=True, weight_decay=0.1, second_moment="gradient"),
        dict(rule="adam", beta_3=0.9),
    ),
    "VRLARS": (
        vrgd_tf.VRLARS,
        dict(learning_rate=5.0, weight_decay=0.1),
        dict(rule="lars", momentum=0.9, decays=lambda w: w.ndim > 1),
    ),
    "VRLAMB": (
        vrgd_tf.VRLAMB,
        dict(learning_rate=0.05, weight_decay=0.1),
        dict(rule="lamb", epsilon=1e-6, beta_3=0.9, decays=lambda w: w.ndim > 1),
    ),
    "LARS": (
        vrgd_tf.LARS,
        dict(learning_rate=5.0, weight_decay=0.1, nesterov=True),
        dict(rule="lars", vr=False, momentum=0.9, decays=lambda w: w.ndim > 1),
    ),
    "LAMB": (
        vrgd_tf.LAMB,
        dict(learning_rate=0.05, weight_decay=0.1),
        dict(rule="lamb", vr=False, epsilon=1e-6, decays=lambda w: w.ndim > 1),
    ),
}
VR_OPTIMIZERS = [name for name in OPTIMIZERS if name.startswith("VR")]


def strategy_of(replicas, merge_call=True):
    """A MirroredStrategy of so many logical CPU devices; the default strategy for one."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    return _mirrored(replicas) if merge_call else _without_merge_call(replicas)


def _mirrored(replicas):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


@functools.cache
def _without_merge_call(replicas):
    """The way that strategies of TPUs, and of GPUs with NCCL, take, on CPUs.

    It uses TensorFlow's collectives, whose keys start anew with each strategy and collide: a process has one.
    """
    strategy = _mirrored(replicas)
    strategy.extended._use_merge_call = lambda: False
    return strategy


@dataclasses.dataclass
class Run:
    weights: list  # after each update, a list of arrays
    optimizer: keras.optimizers.Optimizer
    variables: list
    strategy: tf.distribute.Strategy


def make_variables(values, dtype="float32"):
    return [
        keras.Variable(np.asarray(value), dtype=dtype, name=f"variable_{i}", aggregation="mean")
        for i, value in enumerate(values)
    ]


def make_step(strategy, optimizer, variables, replicas, run_eagerly=False, sparse=False):
    """A function of gradient samples [replicas, ...], one tensor a variable, that takes one train step."""

    def on_replica(samples):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # As a loss that is divided by the number of replicas would give it.
        gradients = [tf.gather(sample, replica) / replicas for sample in samples]
        if sparse:
            gradients = [sparse_of(gradient) if gradient.shape.rank else gradient for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(samples):
        strategy.run(on_replica, args=(samples,))

    return step if run_eagerly else tf.function(step)


def sparse_of(gradient):
    """The same gradient in slices, each row in two halves."""
    rows = tf.range(gradient.shape[0])
    return tf.IndexedSlices(tf.concat([gradient / 2] * 2, 0), tf.concat([rows] * 2, 0), gradient.shape)


def train(make_optimizer, values, samples, replicas=1, merge_call=True, dtype="float32", run_eagerly=False):
    """Trains on `samples[update][sample][variable]`; the samples of an update fill the replicas, step by step."""
    strategy = strategy_of(replicas, merge_call)
    with strategy.scope():
        variables = make_variables(values, dtype)
        optimizer = make_optimizer()
    step = make_step(strategy, optimizer, variables, replicas, run_eagerly)
    weights = []
    for update in samples:
        for start in range(0, len(update), replicas):
            step([tf.constant(np.stack(column), dtype) for column in zip(*update[start : start + replicas])])
        check_replicas_agree(variables + optimizer.variables)
        weights.append([variable.numpy() for variable in variables])
    return Run(weights, optimizer, variables, strategy)


def train_on_batches(model, x, y, batch_size):
    """Trains a compiled model on batch after batch, each of them split over the replicas.

    As `fit` does; it starts faster. Keras' `train_on_batch` gives the whole batch to every replica.
    """
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync

    def on_replica(*data):
        model.train_step(data)

    step = tf.function(lambda *data: strategy.run(on_replica, args=data))
    for at in range(0, len(x), batch_size):
        shards = [np.split(values[at : at + batch_size], replicas) for values in (x, y)]
        step(*[strategy.experimental_distribute_values_from_function(functools.partial(_shard, s)) for s in shards])


def _shard(shards, context):
    return tf.constant(shards[context.replica_id_in_sync_group])


def check_replicas_agree(variables):
    """Fails if a mirrored variable is not bit for bit the same on all replicas."""
    for variable in variables:
        copies = getattr(variable.value, "values", ())
        if variable.synchronization == "on_read":
            continue
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy(), err_msg=variable.path)


def make_samples(rng, updates, k, shapes, scale=1.0):
    """Noisy samples around a signal that differs between elements, so that ratios fill their range."""
    result = []
    for _ in range(updates):
        signal = [rng.normal(size=shape) for shape in shapes]
        spread = [np.exp(rng.normal(size=shape)) for shape in shapes]
        result.append(
            [[np.float32(scale * (m + s * rng.normal(size=m.shape))) for m, s in zip(signal, spread)] for _ in range(k)]
        )
    return result


def assert_weights_close(found, expected, tolerance, err_msg=""):
    """Relative to the norm of each expected tensor."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= tolerance, f"{err_msg} variable {i}: relative error {error:.2e}"
