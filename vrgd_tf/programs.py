"""Pure functions of tensors, compiled by XLA: one program for each signature, shared by all who ask for it.

TensorFlow keeps a compiled program for as long as the process lives, whatever becomes of the `tf.function` that it
comes from. Were each optimizer to compile its own, a search over seeds or learning rates would compile the same update
over and over, and on CPUs run out of memory mappings after some hundred optimizers.

A private name of TensorFlow in use: `gen_xla_ops.xla_optimization_barrier`, for `barrier`.
"""

import contextlib
import threading

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

_programs = {}
_state = threading.local()
# So many partial results XLA computes side by side in the vectors of a CPU.
_PARTIAL_RESULTS = 16
# Larger tensors do not stay in the on-chip memory of a TPU.
_KEPT_BYTES = 32 << 20


def call(function, *args, **static):
    """`function(*args, **static)`, compiled.

    Args:
        function: a pure function that lives as long as the process: of a module, or of a class.
        *args: structures of tensors, with None where an argument is not in use.
        **static: hashable Python values that the program is made for.
    """
    return _run(function, (), args, static)


def call_uncompiled(function, *args, **static):
    """The same as `call`, one operation after the other."""
    return function(*args, **static)


def update(function, variables, *args, **static):
    """Gives `variables` the values `function(values, *args, **static)`, compiled, in the memory that they have.

    Args:
        function: as for `call`. It takes the values of `variables`, and returns new ones in the same structure.
        variables: structure of TensorFlow variables. In a replica, distributed ones stand for those of that replica.
        *args, **static: as for `call`.
    """
    _run(function, variables, args, static)


def _run(function, variables, args, static):
    targets, tensors = tf.nest.flatten(variables), tf.nest.flatten(args)
    specs = [x if x is None else tf.TensorSpec(x.shape, x.dtype) for x in [*targets, *tensors]]
    structure = tf.nest.pack_sequence_as((variables, args), specs)
    key = (function, repr(structure), tuple(sorted(static.items())))
    if key not in _programs:
        _programs[key] = _trace(function, structure, static)
    return _programs[key](*[target.handle for target in targets], *[x for x in tensors if x is not None])


def _trace(function, structure, static):
    targets, tensors = (tf.nest.flatten(part) for part in structure)

    def program(*inputs):
        handles, values = inputs[: len(targets)], iter(inputs[len(targets) :])
        old = [_read(*pair) for pair in zip(handles, targets, strict=True)]
        leaves = [*old, *(spec if spec is None else next(values) for spec in tensors)]
        old, args = tf.nest.pack_sequence_as(structure, leaves)
        if not targets:
            return function(*args, **static)
        new = function(old, *args, **static)
        tf.nest.assert_same_structure(old, new)
        for handle, value in zip(handles, tf.nest.flatten(new), strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    specs = [*(tf.TensorSpec((), tf.resource) for _ in targets), *(spec for spec in tensors if spec is not None)]
    # Out of the step that is being traced: the program belongs to no device and to no replica.
    with tf.init_scope():
        _state.tracing = True
        try:
            return tf.function(program, jit_compile=True, autograph=False).get_concrete_function(*specs)
        finally:
            _state.tracing = False


def _read(handle, spec):
    # Handles, and not variables: a variable that a function takes is the same one for all that share its trace.
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype), spec.shape)


@contextlib.contextmanager
def within_tpu_program():
    """The calls in it become part of the step that a TPUStrategy compiles as a whole."""
    _state.tpu = True
    try:
        yield
    finally:
        _state.tpu = False


def barrier(*structures):
    """The same tensors, each of which waits for all: XLA neither combines nor computes again what stands before it."""
    tensors = [tensor for tensor in tf.nest.flatten(structures) if tensor is not None]
    after = iter(gen_xla_ops.xla_optimization_barrier(tensors) if tensors else ())
    return tf.nest.map_structure(lambda tensor: None if tensor is None else next(after), structures)


def kept(x):
    """`x`, computed once. XLA for TPUs would compute it for each of its uses, and read again what it depends on."""
    # A program of its own is not for a TPU alone.
    inlined = getattr(_state, "tpu", False) and not getattr(_state, "tracing", False)
    if inlined and x.shape.num_elements() * x.dtype.size <= _KEPT_BYTES:
        [x] = barrier(x)
    return x


def total(x):
    """The sum of all elements of `x`, none of which is negative: a scalar of its dtype, not finite where one is not.

    XLA for CPUs writes what a sum over a whole tensor is computed from to memory, and adds one element after the other.
    In a program the sum is therefore made in two steps, of which the first computes and adds in vectors, in one pass.
    """
    return _reduce(tf.reduce_sum, x)


def largest(x):
    """The largest of all elements of `x`, none of which is negative; otherwise as `total`."""
    return _reduce(tf.reduce_max, x)


def _reduce(reduction, x):
    size = x.shape.num_elements()
    if getattr(_state, "tracing", False) and size and size % _PARTIAL_RESULTS == 0:
        # The maximum keeps XLA from making one reduction of the two.
        x = tf.maximum(reduction(tf.reshape(x, (_PARTIAL_RESULTS, -1)), 0), 0)
    return reduction(x)
