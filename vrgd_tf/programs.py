"""Pure functions of tensors, compiled by XLA: one program for each signature, shared by all who ask for it.

TensorFlow keeps a compiled program for as long as the process lives, whatever becomes of the `tf.function` that it
comes from. Were each optimizer to compile its own, a search over seeds or learning rates would compile the same update
over and over, and on CPUs run out of memory mappings after some hundred optimizers.
"""

import tensorflow as tf

_programs = {}


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
        return tf.function(program, jit_compile=True, autograph=False).get_concrete_function(
            *[spec for spec in specs if spec is not None]
        )
