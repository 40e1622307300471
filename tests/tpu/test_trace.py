"""The step that a TPU would run, traced by a real TPUStrategy: what it sends, and that nothing leaves the device.

Not covered: that XLA compiles it for a TPU, and its numbers.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import harness
from tpu_aot.strategy import all_nodes, fake_tpu_strategy

SHAPES = [(6, 4), (4,), (2, 3, 4)]
# Operations that would stop the device to ask the host, or have no fixed shape.
HOST_OPS = {
    "PyFunc",
    "EagerPyFunc",
    "PyFuncStateless",
    "XlaHostCompute",
    "Print",
    "PrintV2",
    "Where",
    "Unique",
    "StringFormat",
}


@pytest.fixture(scope="module")
def strategy():
    return fake_tpu_strategy((2, 2))


def trace(strategy, optimizer, variables, sparse=False):
    def on_replica(*gradients):
        if sparse:
            gradients = [harness.sparse_of(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function
    def step(*gradients):
        strategy.run(on_replica, args=gradients)

    return step.get_concrete_function(*[tf.TensorSpec(v.shape, v.dtype) for v in variables])


@pytest.mark.parametrize("built", ["built", "unbuilt"])
@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", harness.OPTIMIZERS)
def test_step_traces_with_one_sum_for_each_statistic(strategy, name, steps, made, built):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    optimizer = None
    if made == "outside":
        optimizer = cls(gradient_accumulation_steps=steps, **arguments)
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = optimizer or cls(gradient_accumulation_steps=steps, **arguments)
        if built == "built":
            optimizer.build(variables)
    nodes = all_nodes(trace(strategy, optimizer, variables))
    assert {len(variable.value.values) for variable in optimizer.variables} == {4}
    operations = collections.Counter(node.op for node in nodes)
    assert operations["TPUReplicateMetadata"] == 1
    # The gradient of each variable, with the ratio its variance, and a scalar: whether all is finite.
    assert operations["CrossReplicaSum"] == len(SHAPES) * (2 if name.startswith("VR") else 1) + 1
    assert not HOST_OPS & set(operations)
    assert not any(node.attr["_XlaMustCompile"].b for node in nodes), "an inner jit"


def test_sums_stand_in_the_branch_that_updates(strategy):
    """An accumulation step that does not update sends nothing."""
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = cls(gradient_accumulation_steps=2, **arguments)
    graph = trace(strategy, optimizer, variables).graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    top = [graph.node, *(f.node_def for f in functions.values())]
    [branches] = [node for nodes in top for node in nodes if node.op in ("If", "StatelessIf")]

    def sums(name):
        count = 0
        for node in functions[name].node_def:
            count += node.op == "CrossReplicaSum"
            count += sum(sums(a.func.name) for a in node.attr.values() if a.func.name in functions)
        return count

    assert sums(branches.attr["then_branch"].func.name) == 2 * len(SHAPES) + 1
    assert sums(branches.attr["else_branch"].func.name) == 0
    assert sum(node.op == "CrossReplicaSum" for node in graph.node) == 0


@pytest.mark.parametrize("name", harness.VR_OPTIMIZERS)
def test_bytes_of_the_sums(strategy, name):
    cls, arguments, _ = harness.OPTIMIZERS[name]
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
        optimizer = cls(variance_dtype="bfloat16", **arguments)
    nodes = all_nodes(trace(strategy, optimizer, variables))
    dtypes = [tf.as_dtype(node.attr["T"].type) for node in nodes if node.op == "CrossReplicaSum"]
    assert sorted(dtype.size for dtype in dtypes) == [2] * len(SHAPES) + [4] * (len(SHAPES) + 1)


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
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES], dtype)
        optimizer = cls(**(arguments | FEATURES[feature]), gradient_accumulation_steps=2)
    operations = collections.Counter(node.op for node in all_nodes(trace(strategy, optimizer, variables, sparse)))
    assert operations["CrossReplicaSum"] == 2 * len(SHAPES) + (feature != "no skipping")
    assert not HOST_OPS & set(operations)


@pytest.mark.parametrize("steps", [None, 2])
def test_loss_scale_and_schedules_add_no_sum(strategy, steps):
    """That a gradient on some replica is not finite is known from the scalar that is summed anyway."""
    decay = keras.optimizers.schedules.CosineDecay(0.1, 10)
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    inner = cls(**(arguments | {"weight_decay": decay, "learning_rate": decay}), gradient_accumulation_steps=steps)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    with strategy.scope():
        variables = harness.make_variables([np.ones(shape) for shape in SHAPES])
    operations = collections.Counter(node.op for node in all_nodes(trace(strategy, optimizer, variables)))
    assert operations["CrossReplicaSum"] == 2 * len(SHAPES) + 1
    assert not HOST_OPS & set(operations)


@pytest.mark.parametrize("steps", [None, 4])
def test_keras_train_step_traces(strategy, steps):
    cls, arguments, _ = harness.OPTIMIZERS["VRLAMB"]
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(
            optimizer=cls(gradient_accumulation_steps=steps, use_ema=True, global_clipnorm=1.0, **arguments),
            loss="mse",
            metrics=["mae"],
        )
        model.optimizer.build(model.trainable_variables)

    def train_step(*data):
        return model.train_step(data)

    @tf.function
    def step(*data):
        return strategy.run(train_step, args=data)

    concrete = step.get_concrete_function(tf.TensorSpec((16, 8)), tf.TensorSpec((16, 1)))
    operations = collections.Counter(node.op for node in all_nodes(concrete))
    assert operations["CrossReplicaSum"] == 2 * len(model.trainable_variables) + 1
    assert not HOST_OPS & set(operations)
