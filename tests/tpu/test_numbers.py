"""The numbers of the program that a TPU would run: one replica's part, exported, and run on 4 and 8 CPU devices."""

import numpy as np
import pytest
import tensorflow as tf

from tests import harness
from tests.test_optimizers import reference_weights
from tests.tpu import needs_jax
from tpu_aot.execute import execute
from tpu_aot.export import export, replica_strategy

SHAPES = [(6, 4), (4,), (2, 3, 4), ()]


@needs_jax
@pytest.mark.parametrize("replicas, steps", [(4, 2), (8, None)])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_exported_program_equals_the_float64_reference(name, replicas, steps, rng):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    start = [rng.normal(size=shape) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, replicas * (steps or 1), SHAPES)
    strategy = replica_strategy(replicas)
    with strategy.scope():
        variables = harness.make_variables(start)
        optimizer = cls(gradient_accumulation_steps=steps, **arguments)
        optimizer.build(variables)

    def step(*gradients):
        # As a loss that is divided by the number of replicas would give them.
        optimizer.apply_gradients(zip([gradient / replicas for gradient in gradients], variables, strict=True))

    program = export(strategy, step, *[tf.TensorSpec(shape) for shape in SHAPES])
    steps = [
        [np.stack(column) for column in zip(*update[i : i + replicas])]
        for update in samples
        for i in range(0, len(update), replicas)
    ]
    _, values = execute(program, replicas, steps)
    expected = reference_weights(name, start, samples)[-1]
    for replica in range(replicas):
        found = [values[program.index(variable)][replica] for variable in variables]
        harness.assert_weights_close(found, expected, 1e-5)
    for variable in optimizer.variables:
        value = values[program.index(variable)]
        if variable.synchronization != "on_read":
            np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape), err_msg=variable.path)
