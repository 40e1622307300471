"""One replica's part of a step to StableHLO: the program that TPUStrategy would compile for each chip.

TPUStrategy's own replica context and variables are used, on CPU devices. What has no kernel in TensorFlow's CPU wheel
is replaced by what lowers to the same program: the sum across replicas by XLA's.
"""

import contextlib
import typing

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute import tpu_strategy, tpu_util
from tensorflow.python.tpu.ops import tpu_ops

from tpu_aot.strategy import fake_tpu_strategy


class Program(typing.NamedTuple):
    """One replica's program, whose parameters are the arguments, then the variables."""

    stablehlo: bytes
    variables: list  # of the tensors that the function captured: handles of variables

    def values(self):
        """What the variables hold now: a list of arrays."""
        return [_value(captured).numpy() for captured in self.variables]

    def index(self, variable):
        """Which of the variables a Keras variable of the strategy is."""
        [handle] = [component.handle for component in variable.value.values]
        [index] = [i for i, captured in enumerate(self.variables) if captured is handle]
        return index


def _value(captured):
    if captured.dtype != tf.resource:
        return captured
    [data] = captured._handle_data.shape_and_type
    return tf.raw_ops.ReadVariableOp(resource=captured, dtype=tf.as_dtype(data.dtype))


def replica_strategy(replicas):
    """A TPUStrategy of `replicas` chips for `export`, whose variables hold the value of one replica, on a CPU."""
    strategy = fake_tpu_strategy((1, 1))
    extended = strategy.extended
    extended._tpu_devices = np.array([[tf.config.list_logical_devices("CPU")[0].name]], object)
    # Packed variables exist on TPUs only.
    strategy._enable_packed_variable_in_eager_mode = False
    cls = type(extended)
    extended.__class__ = type(cls.__name__, (cls,), {"_num_replicas_in_sync": property(lambda self: replicas)})
    return strategy


def export(strategy, function, *specs):
    """The `Program` of `function(*tensors)`, called in a replica of a `replica_strategy`.

    Its results come first among the program's, then the variables that it writes.
    """

    def replica(*args):
        with _replica_context(strategy):
            return function(*args)

    traced = tf.function(replica, jit_compile=True, autograph=False)
    stablehlo = traced.experimental_get_compiler_ir(*specs)(stage="stablehlo_serialized")
    return Program(stablehlo, traced.get_concrete_function(*specs).captured_inputs)


@contextlib.contextmanager
def _replica_context(strategy):
    groups = [list(range(strategy.num_replicas_in_sync))]

    def cross_replica_sum(x, group_assignment=None, name=None):
        return gen_xla_ops.xla_all_reduce(
            x, groups if group_assignment is None else group_assignment, "Add", "CrossReplica"
        )

    class Context:
        def get_replicated_var_handle(self, name, handle_id, variables, *args, **kwargs):
            return variables[0].handle

    with contextlib.ExitStack() as stack:
        for module, name, value in [
            (tpu_ops, "cross_replica_sum", cross_replica_sum),
            (tpu_util, "enclosing_tpu_context", Context),
        ]:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        with tpu_strategy._TPUReplicaContext(strategy, replica_id_in_sync_group=0):
            yield
