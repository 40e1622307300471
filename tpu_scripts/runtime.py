"""What the scripts share: which devices to train on."""

import tensorflow as tf

import vrgd_tf  # noqa: F401  (first: it says what is missing)


def make_strategy(replicas, tpu=None):
    """A strategy for this machine: its TPUs, else its GPUs, else logical CPU devices.

    Called before anything else uses TensorFlow's devices.

    Args:
        replicas: int, how many to use; all of a TPU's, and no more than there are of GPUs.
        tpu: str or None, the TPU to connect to: its name, or "local" on a TPU VM. None looks for local ones.

    Returns:
        `(strategy, description)`, the latter a short text for the user.
    """
    if tpu is None and tf.config.list_physical_devices("TPU"):
        tpu = "local"
    if tpu is not None:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu=tpu)
        strategy = tf.distribute.TPUStrategy(resolver)
        return strategy, f"{strategy.num_replicas_in_sync} TPU cores"
    gpus = tf.config.list_physical_devices("GPU")[:replicas]
    if len(gpus) >= 2:
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(len(gpus))]), f"{len(gpus)} GPUs"
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        # TensorFlow's default for CPUs fails with steps_per_execution > 1.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    return strategy, f"{replicas} logical CPU devices"
