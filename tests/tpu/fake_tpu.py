"""A real TPUStrategy on a machine without a TPU. It can trace a step, and not run it.

A cluster resolver supplies the metadata and the topology that a TPU would report; everything that TensorFlow does with
them is its own: the distributed variables, the replica context, the replicated computation with its collectives.
"""

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import topology as topology_lib
from tensorflow.python.tpu import tpu_strategy_util, tpu_system_metadata

_DEVICE = "/job:localhost/replica:0/task:0/device:"


class _Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """What a TPU VM's resolver answers, for one host with `chips` chips."""

    def __init__(self, chips, topology):
        self._chips = chips
        self._topology_of_chips = topology

    def get_tpu_system_metadata(self):
        tpus = [session._DeviceAttributes(f"{_DEVICE}TPU:{i}", "TPU", 0, 0) for i in range(self._chips)]
        host = session._DeviceAttributes(f"{_DEVICE}CPU:0", "CPU", 0, 0)
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._chips,
            num_hosts=1,
            num_of_cores_per_host=self._chips,
            topology=self._topology_of_chips,
            devices=(*tpus, host),
        )

    tpu_hardware_feature = property(lambda self: None)
    task_type = property(lambda self: None)
    task_id = property(lambda self: None)

    def cluster_spec(self):
        return tf.train.ClusterSpec({})

    def master(self, *args, **kwargs):
        return ""

    get_master = master

    def get_job_name(self):
        return None

    get_coordinator_name = get_job_name


def fake_tpu_strategy(mesh=(2, 2)):
    """A TPUStrategy of one host whose chips form a `mesh`, with one core each."""
    x, y = mesh
    coordinates = np.array([[[i, j, 0, 0] for j in range(y) for i in range(x)]], np.int32)
    topology = topology_lib.Topology(mesh_shape=np.array([x, y, 1, 1], np.int32), device_coordinates=coordinates)
    tpu_strategy_util._INITIALIZED_TPU_SYSTEMS[""] = topology
    return tf.distribute.TPUStrategy(_Resolver(x * y, topology))


def all_nodes(concrete_function):
    """The nodes of a traced function and of all functions that it calls."""
    graph = concrete_function.graph.as_graph_def()
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
