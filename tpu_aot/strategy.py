"""A real TPUStrategy on a machine without a TPU. It can trace a step, and not run it.

A cluster resolver supplies the metadata and the topology that a TPU would report; everything that TensorFlow does with
them is its own: the distributed variables, the replica context, the replicated computation with its collectives.
"""

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import topology as topology_lib
from tensorflow.python.tpu import tpu_strategy_util, tpu_system_metadata

CHIPS_PER_HOST = 4


class _Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """What the resolver of a TPU VM answers for a topology of [hosts, chips of one, 4] coordinates."""

    def __init__(self, topology, job):
        self._topology = topology
        self._job = job

    def get_tpu_system_metadata(self):
        hosts, chips = self._topology.device_coordinates.shape[:2]
        devices = []
        for host in range(hosts):
            prefix = f"/job:{self._job}/replica:0/task:{host}/device"
            names = [("TPU", f"{prefix}:TPU:{i}") for i in range(chips)] + [("CPU", f"{prefix}:CPU:0")]
            devices += [session._DeviceAttributes(name, kind, 0, 0) for kind, name in names]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=hosts * chips,
            num_hosts=hosts,
            num_of_cores_per_host=chips,
            topology=self._topology,
            devices=tuple(devices),
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


def fake_tpu_strategy(mesh=(2, 2), hosts=1, job="localhost"):
    """A TPUStrategy whose chips form a `mesh`, with one core each.

    Args:
        mesh: pair of ints, chips in x and in y.
        hosts: int, how many hosts share the chips, each an equal part of the rows of y.
        job: str, the job whose tasks the hosts are. TensorFlow has to know it: see `tests/tpu/pod.py`.
    """
    x, y = mesh
    coordinates = np.array([[i, j, 0, 0] for j in range(y) for i in range(x)], np.int32).reshape(hosts, -1, 4)
    topology = topology_lib.Topology(mesh_shape=np.array([x, y, 1, 1], np.int32), device_coordinates=coordinates)
    tpu_strategy_util._INITIALIZED_TPU_SYSTEMS[""] = topology
    return tf.distribute.TPUStrategy(_Resolver(topology, job))


def all_nodes(concrete_function):
    """The nodes of a traced function and of all functions that it calls."""
    graph = concrete_function.graph.as_graph_def()
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
