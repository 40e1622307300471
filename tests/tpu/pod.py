"""Traces steps under a TPUStrategy of a pod of 4 hosts with 4 chips each, without a TPU. Prints JSON.

python -m tests.tpu.pod. The hosts are 4 servers of TensorFlow in this process, on free ports of localhost. Each holds
the variables of its own chips and reads its own part of the input. A process that is connected to them stays so, and
that is why it is not the one that runs the tests.
"""

import collections
import json
import math
import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

from tests import harness
from tests.tpu import test_trace
from tpu_aot.strategy import bytes_of, fake_tpu_strategy

HOSTS = 4
MESH = (4, 4)
SHAPES = [(6, 4), (4,), (2, 3, 4)]


def pod_strategy():
    """The strategy of the pod, and the servers, which have to be kept."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(HOSTS)]
    cluster = tf.train.ClusterSpec({"worker": [f"localhost:{at.getsockname()[1]}" for at in sockets]})
    for at in sockets:
        at.close()
    # One thread for each: the process has many of them, and nothing to compute.
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": math.prod(MESH) // HOSTS}, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
    )
    servers = [tf.distribute.Server(cluster, "worker", task, config=config) for task in range(HOSTS)]
    tf.config.experimental_connect_to_cluster(cluster)
    return fake_tpu_strategy(MESH, HOSTS, job="worker"), servers


def described(strategy):
    """What chips run and send in two steps, a bare one of VRLAMB and the train step of `fit`, and the variables."""
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = test_trace.optimizer_of("VRLAMB", gradient_accumulation_steps=2)
    bare = test_trace.trace(strategy, optimizer, variables)
    fit, model = test_trace.trace_fit(
        strategy,
        lambda: test_trace.optimizer_of("VRLAMB", gradient_accumulation_steps=2, use_ema=True),
        synchronized=True,
    )
    result = dict(replicas=strategy.num_replicas_in_sync, hosts=strategy.extended.num_hosts)
    for name, computation in {"bare": bare, "fit": fit}.items():
        test_trace.check(computation)
        sums = computation.sums()
        result[name] = dict(sums=sum(sums.values()), bytes=bytes_of(sums), operations=dict(computation.counts))
    return result, [*variables, *optimizer.variables, *model.variables, *model.optimizer.variables]


def places(variables):
    """How many components of a variable each task has, pairs in order: a list of all ways among the variables."""
    found = set()
    for variable in variables:
        devices = [tf.DeviceSpec.from_string(component.device) for component in variable.value.values]
        assert len({(device.task, device.device_index) for device in devices}) == len(devices), variable.path
        found.add(tuple(collections.Counter(device.task for device in devices).items()))
    return sorted(found)


if __name__ == "__main__":
    strategy, servers = pod_strategy()
    result, variables = described(strategy)
    print(json.dumps(result | {"places": places(variables)}))
