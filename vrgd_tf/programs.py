"""Pure functions of tensors, compiled by XLA: one program for each signature, shared by all who ask for it.

TensorFlow keeps a compiled program for as long as the process lives, whatever becomes of the `tf.function` that it
comes from. Were each optimizer to compile its own, a search over seeds or learning rates would compile the same update
over and over, and on CPUs run out of memory mappings after some hundred optimizers.
"""

import threading

import tensorflow as tf

_programs = {}
_state = threading.local()
# So many partial results XLA computes side by side in the vectors of a CPU.
_PARTIAL_RESULTS = 16


def call(function, *args, **static):
    """`function(*args, **static)`, compiled.

    Args:
        function: a pure function that lives as long as the process: of a module, or of a class.
        *args: structures of tensors, with None where an argument is not in use.
        **static: hashable Python values that the program is made for.
    """
    leaves = tf.nest.flatten(args)
    specs = [leaf if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    structure = tf.nest.pack_sequence_as(args, specs)
    key = (function, repr(structure), tuple(sorted(static.items())))
    if key not in _programs:
        _programs[key] = _trace(function, structure, specs, static)
    return _programs[key](*[leaf for leaf in leaves if leaf is not None])


def _trace(function, structure, specs, static):
    def program(*tensors):
        values = iter(tensors)
        leaves = [spec if spec is None else next(values) for spec in specs]
        return function(*tf.nest.pack_sequence_as(structure, leaves), **static)

    # Out of the step that is being traced: the program belongs to no device and to no replica.
    with tf.init_scope():
        _state.tracing = True
        try:
            return tf.function(program, jit_compile=True, autograph=False).get_concrete_function(
                *[spec for spec in specs if spec is not None]
            )
        finally:
            _state.tracing = False


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
