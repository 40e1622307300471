"""The step that a TPU would run, traced by a real TPUStrategy: what it sends, and that nothing leaves the device.

Not covered: that XLA compiles it for a TPU, and its numbers.
"""

import collections
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import harness
from tpu_aot.strategy import (
    ReplicatedComputation,
    bytes_of,
    called_by,
    fake_tpu_strategy,
    operations_of,
    sums_among,
    trace_train_function,
)

SHAPES = [(6, 4), (4,), (2, 3, 4)]
# Operations that would stop the device to ask the host, or have no fixed shape.
HOST_OPS = {
    "PyFunc",
    "EagerPyFunc",
    "PyFuncStateless",
    "XlaHostCompute",
    "XlaSendToHost",
    "XlaRecvFromHost",
    "InfeedDequeue",
    "InfeedDequeueTuple",
    "OutfeedEnqueue",
    "OutfeedEnqueueTuple",
    "Print",
    "PrintV2",
    "Where",
    "Unique",
    "StringFormat",
}
COLLECTIVE = re.compile("AllToAll|AllReduce|AllGather|ReduceScatter|Collective|CrossReplica")
LONG_INTEGERS = {tf.int64.as_datatype_enum, tf.uint64.as_datatype_enum}
ONE_SCALAR = collections.Counter({((), "float32"): 1})


@pytest.fixture(scope="module")
def strategy():
    return fake_tpu_strategy((2, 2))


def optimizer_of(name, **arguments):
    cls, own, _ = harness.OPTIMIZERS[name]
    return cls(**(own | arguments))


def trace(strategy, optimizer, variables, sparse=False):
    def on_replica(*gradients):
        if sparse:
            gradients = [harness.sparse_of(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function
    def step(*gradients):
        strategy.run(on_replica, args=gradients)

    return ReplicatedComputation(step.get_concrete_function(*[tf.TensorSpec(v.shape, v.dtype) for v in variables]))


def make_model(optimizer, policy="float32", synchronized=False, **arguments):
    """A model whose embedding has a sparse gradient, and whose BatchNormalization may send sums of its own."""
    layers = [
        keras.layers.Embedding(10, 4, dtype=policy),
        keras.layers.Conv1D(3, 2, use_bias=False, dtype=policy),
        keras.layers.BatchNormalization(synchronized=synchronized, dtype=policy),
        keras.layers.Flatten(dtype=policy),
        keras.layers.Dense(2, use_bias=False, dtype=policy),
    ]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **arguments)
    return model


def trace_fit(strategy, make_optimizer, batches=None, **arguments):
    """The train step of `fit` on so many batches, None for a dataset that never ends, and the model."""
    with strategy.scope():
        model = make_model(make_optimizer(), **arguments)
    batch = 4 * strategy.num_replicas_in_sync
    examples = tf.data.Dataset.from_tensors((np.zeros(6, np.int32), np.zeros((), np.int32)))
    examples = examples.repeat(batches and batches * batch)
    return ReplicatedComputation(trace_train_function(model, examples.batch(batch, drop_remainder=True))), model


def sums_of(variables, dtype=None):
    """A sum for each of the variables, in their dtype or in another."""
    return collections.Counter((tuple(variable.shape), dtype or variable.dtype) for variable in variables)


def without_shape(computation):
    """Those operations that have an output of unknown shape: a counter of their types and outputs."""
    outputs = [(operation.type, [tensor.shape for tensor in operation.outputs]) for operation in computation.operations]
    return collections.Counter(
        f"{kind} {shapes}" for kind, shapes in outputs if not all(shape.is_fully_defined() for shape in shapes)
    )


def check_stays_on_the_device(computation):
    """No operation asks the host or another compiler, and sums are all that is sent."""
    assert computation.counts["TPUReplicateMetadata"] == 1
    assert not HOST_OPS & set(computation.counts)
    assert {kind for kind in computation.counts if COLLECTIVE.search(kind)} == {"CrossReplicaSum"}
    for operation in computation.operations:
        attributes = operation.node_def.attr
        assert "_xla_outside_compilation" not in attributes, f"left to the host: {operation.name}"
        # XLA for TPUs makes hundreds of operations of a division of 64 bits.
        assert not ("Div" in operation.type or "Mod" in operation.type) or attributes["T"].type not in LONG_INTEGERS
        assert not ("_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b), f"inner jit: {operation.name}"


def check(computation):
    """Nothing leaves the device, and the shape of every tensor is known."""
    check_stays_on_the_device(computation)
    assert not without_shape(computation)


@pytest.mark.parametrize("built", ["built", "unbuilt"])
@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_step_traces_with_one_sum_for_each_statistic(strategy, name, steps, made, built):
    optimizer = None
    if made == "outside":
        optimizer = optimizer_of(name, gradient_accumulation_steps=steps)
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = optimizer or optimizer_of(name, gradient_accumulation_steps=steps)
        if built == "built":
            optimizer.build(variables)
    computation = trace(strategy, optimizer, variables)
    assert {len(variable.value.values) for variable in optimizer.variables} == {4}
    # The gradient of each variable, with the ratio its variance, and a scalar: whether all is finite.
    statistics = variables * (2 if name.startswith("VR") else 1)
    assert computation.sums() == sums_of(statistics) + ONE_SCALAR
    check(computation)


def test_sums_stand_in_the_branch_that_updates(strategy):
    """An accumulation step that does not update sends nothing."""
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = optimizer_of("VRLAMB", gradient_accumulation_steps=2)
    computation = trace(strategy, optimizer, variables)
    [branches] = [operation for operation in computation.operations if operation.type in ("If", "StatelessIf")]
    graphs = called_by(branches)
    expected = sums_of(variables * 2) + ONE_SCALAR
    assert sums_among(operations_of(graphs["then_branch"])) == expected
    assert not sums_among(operations_of(graphs["else_branch"]))
    assert computation.sums() == expected, "no sum outside of the branches"


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_bytes_of_the_sums(strategy, name):
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = optimizer_of(name, variance_dtype="bfloat16")
    sums = trace(strategy, optimizer, variables).sums()
    assert sums == sums_of(variables) + sums_of(variables, "bfloat16") + ONE_SCALAR
    assert bytes_of(sums) == (4 + 2) * sum(np.prod(shape) for shape in SHAPES) + 4


FEATURES = {
    "clipnorm": dict(clipnorm=1.0),
    "clipvalue": dict(clipvalue=1.0),
    "global_clipnorm": dict(global_clipnorm=1.0),
    "average": dict(use_ema=True),
    "average that overwrites": dict(use_ema=True, ema_overwrite_frequency=2),
    "loss_scale_factor": dict(loss_scale_factor=8.0),
    "no skipping": dict(skip_nonfinite=False),
    "exclusions": dict(exclude_from_weight_decay=["_0"], exclude_from_layer_adaptation=[]),
}


@pytest.mark.parametrize("sparse, dtype", [(False, "float32"), (True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_add_no_sum_and_nothing_that_leaves_the_device(strategy, feature, sparse, dtype):
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES], dtype)
        optimizer = optimizer_of("VRLAMB", **FEATURES[feature], gradient_accumulation_steps=2)
    computation = trace(strategy, optimizer, variables, sparse)
    finite = collections.Counter() if feature == "no skipping" else ONE_SCALAR
    assert computation.sums() == sums_of(variables * 2, "float32") + finite
    check(computation)


@pytest.mark.parametrize("steps", [None, 2])
def test_loss_scale_and_schedules_add_no_sum(strategy, steps):
    """That a gradient on some replica is not finite is known from the scalar that is summed anyway."""
    decay = keras.optimizers.schedules.CosineDecay(0.1, 10)
    inner = optimizer_of("VRLAMB", weight_decay=decay, learning_rate=decay, gradient_accumulation_steps=steps)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
    computation = trace(strategy, optimizer, variables)
    assert computation.sums() == sums_of(variables * 2) + ONE_SCALAR
    check(computation)


@pytest.fixture(scope="module")
def plain(strategy):
    """The same step with Keras' SGD: what the model itself sends, and a sum for each gradient."""
    return functools.cache(lambda **arguments: trace_fit(strategy, lambda: keras.optimizers.SGD(0.1), **arguments)[0])


# Arguments of the optimizer, and of the model.
TRAIN_STEPS = {
    "plain": ({}, {}),
    "accumulation": (dict(gradient_accumulation_steps=2), {}),
    "average that overwrites": (dict(use_ema=True, ema_overwrite_frequency=2), {}),
    "clipnorm": (dict(clipnorm=1.0), {}),
    "global_clipnorm": (dict(global_clipnorm=1.0), {}),
    "mixed_bfloat16": ({}, dict(policy="mixed_bfloat16")),
    "loop of steps": ({}, dict(steps_per_execution=2)),
    "everything": (
        dict(gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2, global_clipnorm=1.0),
        dict(policy="mixed_bfloat16", steps_per_execution=2, synchronized=True),
    ),
}


@pytest.mark.parametrize("case", TRAIN_STEPS)
@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_keras_train_step_traces(strategy, plain, name, case):
    """To what the step sends with a plain optimizer come a variance for each variable and one scalar."""
    arguments, settings = TRAIN_STEPS[case]
    computation, model = trace_fit(strategy, lambda: optimizer_of(name, **arguments), **settings)
    gradients = sums_of(model.trainable_variables)
    of_plain = plain(**settings).sums()
    assert gradients <= of_plain
    assert (of_plain == gradients) != settings.get("synchronized", False), "a model that sums, or one that does not"
    assert computation.sums() == of_plain + gradients + ONE_SCALAR
    parameters = sum(np.prod(variable.shape) for variable in model.trainable_variables)
    assert bytes_of(computation.sums()) == bytes_of(of_plain) + 4 * parameters + 4
    # The gradient of the embedding is sparse, and is made dense once.
    assert computation.counts["UnsortedSegmentSum"] == plain(**settings).counts["UnsortedSegmentSum"] == 1
    check(computation)


def test_batches_of_unknown_size_leave_the_update_as_it_is(strategy, plain):
    """In a loop over a dataset that ends, TensorFlow leaves the size of a batch open, whatever the optimizer."""
    settings = dict(steps_per_execution=2, batches=4)
    computation, model = trace_fit(strategy, lambda: optimizer_of("VRLAMB"), **settings)
    assert computation.sums() == sums_of(model.trainable_variables * 2) + ONE_SCALAR
    check_stays_on_the_device(computation)
    assert without_shape(plain(**settings)), "the batch has a known size, and there is nothing to compare"
    assert without_shape(computation) == without_shape(plain(**settings))


def operations_and_shapes(computation, largest):
    """A counter of the operations with what they return, and how many numbers name the replicas of each collective.

    No other constant may have more than `largest` elements.
    """
    found, replicas = collections.Counter(), set()
    for operation in computation.operations:
        sizes = [tensor.shape.num_elements() for tensor in operation.outputs]
        if operation.type == "Const":
            if any(COLLECTIVE.search(reader.type) for reader in operation.outputs[0].consumers()):
                replicas |= set(sizes)
                continue
            assert max(sizes) <= largest, operation.name
        outputs = [(tuple(tensor.shape), tensor.dtype.name) for tensor in operation.outputs]
        found[f"{operation.type} {outputs}"] += 1
    return found, replicas


@pytest.fixture(scope="module")
def large_strategy():
    return fake_tpu_strategy((8, 8))


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_nothing_grows_with_the_number_of_chips(strategy, large_strategy, name):
    def program(strategy):
        with strategy.scope():
            variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
            optimizer = optimizer_of(name, gradient_accumulation_steps=2)
        computation = trace(strategy, optimizer, variables)
        check(computation)
        return operations_and_shapes(computation, max(np.prod(shape) for shape in SHAPES))

    operations, replicas = program(strategy)
    # To each sum belongs the list of the chips that take part in it.
    assert replicas == {4}
    assert program(large_strategy) == (operations, {64})


def test_nothing_grows_in_the_train_step_with_the_number_of_chips(strategy, large_strategy):
    def program(strategy):
        computation, model = trace_fit(strategy, lambda: optimizer_of("VRLAMB", gradient_accumulation_steps=2))
        check(computation)
        largest = max(np.prod(variable.shape) for variable in model.trainable_variables)
        return operations_and_shapes(computation, largest)

    operations, replicas = program(strategy)
    assert replicas == {4}
    assert program(large_strategy) == (operations, {64})
