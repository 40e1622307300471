"""The programs that are compiled for TPUs: updates of known sets of variables, and train steps of whole models.

Each function gives one replica's `Program`, exported for so many replicas. Nothing that they hold is trained: shapes,
dtypes and the graph are all that matters.
"""

import math
from unittest import mock

import keras
import tensorflow as tf

import vrgd_tf
from tpu_aot.export import export, replica_strategy
from vrgd_tf import programs, replicas

# As a user has them, with weight decay.
OPTIMIZERS = {
    "LAMB": lambda: vrgd_tf.LAMB(1e-3, weight_decay=0.01),
    "VRLAMB": lambda: vrgd_tf.VRLAMB(1e-3, weight_decay=0.01),
    "VRLAMB, bfloat16 variance": lambda: vrgd_tf.VRLAMB(1e-3, weight_decay=0.01, variance_dtype="bfloat16"),
    "VRAdam": lambda: vrgd_tf.VRAdam(1e-3, weight_decay=0.01),
    "VRLARS": lambda: vrgd_tf.VRLARS(1.0, weight_decay=1e-4),
    "VRMomentum": lambda: vrgd_tf.VRMomentum(0.1),
    "VRSGD": lambda: vrgd_tf.VRSGD(0.1),
}


class OneReduction(vrgd_tf.VRLAMB):
    """VRLAMB with both statistics in one reduction, to compare its cost. E[g^2] - E[g]^2 cancels in float32."""

    def _update_in_turn(self, *args):
        with mock.patch.object(replicas, "reduce_in_turn", _reduce_at_once):
            return super()._update_in_turn(*args)


def _reduce_at_once(replica_means, squared_deviations, then, before, **unused):
    count = replicas.replica_count()
    results, last = [], []
    for group in replicas._groups(replica_means):
        means, before, last = programs.barrier([replica_means[i] for i in group], before, last)
        results += last
        sums = programs.barrier(*replicas.all_reduce_sum([*means, *(tf.square(mean) for mean in means)]))
        gradients, squares = sums[: len(group)], sums[len(group) :]
        variances = [square * count / tf.square(gradient) - 1 for gradient, square in zip(gradients, squares)]
        last = [then(i, *row, before) for i, *row in zip(group, gradients, variances, strict=True)]
    return [*results, *last][::-1], before


# Measured when asked for.
COMPARISONS = {"VRLAMB, one reduction": lambda: OneReduction(1e-3, weight_decay=0.01)}
# Words of 4 bytes a parameter that an update moves at least: the gradient read, weights and slots read and written.
LEAST_WORDS = {
    "LAMB": 7,
    "VRLAMB": 9,
    "VRLAMB, bfloat16 variance": 9,
    "VRLAMB, one reduction": 9,
    "VRAdam": 9,
    "VRLARS": 5,
    "VRMomentum": 5,
    "VRSGD": 3,
}


def small():
    """Shapes of a few layers: 0.2M parameters."""
    return [(3, 3, 64, 128), (128,), (512, 256), (256,)]


def resnet50():
    """Shapes of ResNet-50: 25.6M parameters in 161 tensors."""
    with tf.Graph().as_default(), keras.device("cpu"):
        model = keras.applications.ResNet50(weights=None)
    # Keras' convolutions have biases, which the network of the paper has not.
    biases = {layer.bias.path for layer in model.layers if isinstance(layer, keras.layers.Conv2D)}
    return [tuple(v.shape) for v in model.trainable_variables if v.path not in biases]


def bert_large():
    """Shapes of BERT-large: 336M parameters in 397 tensors, 31M of them in the embedding."""
    width, hidden, vocabulary = 1024, 4096, 30522
    dense = [(width, width), (width,)]
    norm = [(width,), (width,)]
    layer = 4 * dense + norm + [(width, hidden), (hidden,), (hidden, width), (width,)] + norm
    embeddings = [(vocabulary, width), (512, width), (2, width), *norm]
    return embeddings + 24 * layer + dense + dense + norm + [(vocabulary,), (width, 2), (2,)]


def size(shape):
    """The number of parameters of a variable."""
    return math.prod(shape)


SETS = {"small": small, "ResNet-50": resnet50, "BERT-large": bert_large}


def export_update(make_optimizer, shapes, replicas):
    """An update of float32 variables, from the gradients of one replica."""
    strategy = replica_strategy(replicas)
    with strategy.scope():
        variables = [keras.Variable("zeros", shape=shape, aggregation="mean") for shape in shapes]
        optimizer = make_optimizer()
        optimizer.build(variables)

    def update(*gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return export(strategy, update, *[tf.TensorSpec(shape) for shape in shapes])


def cnn():
    """`(model, inputs, labels)`: two convolutions with BatchNormalization, images of 32 x 32, 32 for each replica."""
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *[layer for width in (32, 64) for layer in _convolution(width)],
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    return model, tf.TensorSpec((32, 32, 32, 3)), tf.TensorSpec((32,), tf.int32)


def _convolution(width):
    return [
        keras.layers.Conv2D(width, 3, strides=2, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Activation("relu"),
    ]


def transformer():
    """`(model, inputs, labels)`: two layers of width 256 that predict tokens, 8 x 128 of them for each replica."""
    vocabulary, width, length = 8192, 256, 128
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    x = x + keras.layers.Embedding(length, width)(keras.ops.arange(length))
    for _ in range(2):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, width // 4)(x, x))
        hidden = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    model = keras.Model(tokens, keras.layers.Dense(vocabulary)(x))
    return model, tf.TensorSpec((8, length), tf.int32), tf.TensorSpec((8, length), tf.int32)


def resnet50_model():
    """`(model, inputs, labels)`: ResNet-50 on images of 224 x 224, 32 for each replica."""
    model = keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3), classifier_activation=None)
    return model, tf.TensorSpec((32, 224, 224, 3)), tf.TensorSpec((32,), tf.int32)


MODELS = {"CNN": cnn, "transformer": transformer, "ResNet-50 at 224 x 224": resnet50_model}


def export_train_step(make_optimizer, make_model, replicas, policy="mixed_bfloat16"):
    """What `model.fit` does with the batch of one replica: model, loss, metric, gradients and update."""
    strategy = replica_strategy(replicas)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model, *specs = make_model()
            model.compile(
                optimizer=make_optimizer(),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["sparse_categorical_accuracy"],
            )
            model.optimizer.build(model.trainable_variables)
    finally:
        keras.config.set_dtype_policy(before)

    def train_step(inputs, labels):
        return model.train_step((inputs, labels))

    return export(strategy, train_step, *specs)
