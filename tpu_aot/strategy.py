"""A real TPUStrategy on a machine without a TPU. It can trace a step, and not run it.

A cluster resolver supplies the metadata and the topology that a TPU would report; everything that TensorFlow does with
them is its own: the distributed variables, the replica context, the replicated computation with its collectives.
"""

import collections
import inspect

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import topology as topology_lib
from tensorflow.python.tpu import tpu_strategy_util, tpu_system_metadata


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
        job: str, the job whose tasks the hosts are. TensorFlow has to be connected to it, and each of its tasks has to
            have a logical CPU for each of its chips: see `tests/tpu/pod.py`.
    """
    x, y = mesh
    coordinates = np.array([[i, j, 0, 0] for j in range(y) for i in range(x)], np.int32).reshape(hosts, -1, 4)
    topology = topology_lib.Topology(mesh_shape=np.array([x, y, 1, 1], np.int32), device_coordinates=coordinates)
    tpu_strategy_util._INITIALIZED_TPU_SYSTEMS[""] = topology
    strategy = tf.distribute.TPUStrategy(_Resolver(topology, job))
    if job != "localhost":
        _place_on_cpus(strategy.extended)
    return strategy


def _place_on_cpus(extended):
    """Keeps what belongs on a chip of `extended` on the CPU of the same task and number.

    In this process TensorFlow does so itself with what it is to put on a device that it does not have. On another task
    it refuses.
    """
    extended._tpu_devices = np.array([[_cpu(device) for device in row] for row in extended._tpu_devices], object)
    workers = extended._device_input_worker_devices
    for host, devices in workers.items():
        workers[host] = [_cpu(device) for device in devices]


def _cpu(device):
    return device.replace("TPU", "CPU")


def trace_train_function(model, dataset):
    """The function that `model.fit(dataset)` calls, traced under the model's strategy: a concrete function.

    It takes `steps_per_execution` steps, each on what the iterator of the distributed dataset gives.
    """
    model.make_train_function()
    # `model.train_function` itself runs what it traces.
    function = inspect.getclosurevars(model.train_function).nonlocals["multi_step_on_iterator"]
    return function.get_concrete_function(iter(model.distribute_strategy.experimental_distribute_dataset(dataset)))


class ReplicatedComputation:
    """What each chip runs of a traced function: the replicated computation, with all functions that it calls.

    Attributes:
        operations: list of `tf.Operation`.
        counts: `collections.Counter` of their types.
    """

    def __init__(self, concrete_function):
        found = operations_of(concrete_function.graph)
        self.operations = _with_called(
            [operation for operation in found if "_tpu_replicate" in operation.node_def.attr]
        )
        self.counts = collections.Counter(operation.type for operation in self.operations)

    def sums(self):
        """`collections.Counter` of the shapes and dtypes of the tensors that are summed over all chips."""
        return sums_among(self.operations)


def sums_among(operations):
    """`collections.Counter` of `(shape, dtype)`, a tuple and a name, of the sums over all chips in `operations`."""
    tensors = [operation.outputs[0] for operation in operations if operation.type == "CrossReplicaSum"]
    return collections.Counter((tuple(tensor.shape), tensor.dtype.name) for tensor in tensors)


def bytes_of(sums):
    """How many bytes of a chip enter the sums that `sums_among` has found."""
    return sum(count * int(np.prod(shape)) * tf.as_dtype(dtype).size for (shape, dtype), count in sums.items())


def operations_of(graph):
    """The operations of `graph` and of all functions that they call, each function once."""
    return _with_called(graph.get_operations())


def called_by(operation):
    """Dict from names of attributes to the graphs of the functions that `operation` calls."""
    return {name: operation.graph._get_function(function).graph for name, function in _names_called_by(operation)}


def _with_called(operations):
    result, seen = list(operations), set()
    for operation in result:  # Which grows meanwhile.
        for _, function in _names_called_by(operation):
            if function not in seen:
                seen.add(function)
                result += operation.graph._get_function(function).graph.get_operations()
    return result


def _names_called_by(operation):
    for name, value in operation.node_def.attr.items():
        if value.func.name:
            yield name, value.func.name
        for i, function in enumerate(value.list.func):
            yield f"{name}_{i}", function.name
