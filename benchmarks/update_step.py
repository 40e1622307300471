"""What does an update cost? Whole `apply_gradients` in a tf.function, stock Keras and ours side by side.

    python -m benchmarks.update_step
    python -m benchmarks.update_step --sets=bert-small --replicas=2,4 --what=update,parts --json=update.json

Each round runs all optimizers of a group in turn, so that a change of the machine's speed meets them all; medians, and
their ratios to the stock optimizer of the group, are printed. Gradients differ from replica to replica. With one
replica, four accumulation steps make an update, and their whole is timed.

`update`: the update alone, and the time of the first call, which traces and compiles. `parts`: where VRLAMB's time
goes, each part compiled by itself, next to the time that the bytes which it has to move take at the speed of a plain
addition. `fit`: train steps of whole models as `model.fit` runs them, on 2 replicas.

The times are of CPUs and say nothing about TPUs. Replicas on CPUs share their memory, and let one of them compute what
is the same for all; on other devices each computes it.
"""

import argparse
import json
import multiprocessing
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import vrgd_tf
from tpu_aot.programs import resnet50
from vrgd_tf import gsnr, programs, replicas, rules

ACCUMULATION_STEPS = 4  # of one replica
# The first of each group is what the others are compared with.
GROUPS = [
    {
        "keras SGD(momentum)": lambda **k: keras.optimizers.SGD(1e-4, momentum=0.9, **k),
        "VRMomentum": lambda **k: vrgd_tf.VRMomentum(1e-4, **k),
        "LARS": lambda **k: vrgd_tf.LARS(1e-4, **k),
        "VRLARS": lambda **k: vrgd_tf.VRLARS(1e-4, **k),
    },
    {
        "keras AdamW": lambda **k: keras.optimizers.AdamW(1e-4, weight_decay=0.004, **k),
        "keras Adam": lambda **k: keras.optimizers.Adam(1e-4, **k),
        "VRAdam": lambda **k: vrgd_tf.VRAdam(1e-4, weight_decay=0.004, **k),
    },
    {
        "keras Lamb": lambda **k: keras.optimizers.Lamb(1e-4, **k),
        "LAMB": lambda **k: vrgd_tf.LAMB(1e-4, **k),
        "VRLAMB": lambda **k: vrgd_tf.VRLAMB(1e-4, **k),
    },
]


def bert_small():
    """Shapes of BERT with 4 layers of width 512: 29.1M parameters, more than half of them in the embedding."""
    dense = [(512, 512), (512,)]
    norm = [(512,), (512,)]
    layer = 4 * dense + norm + [(512, 2048), (2048,), (2048, 512), (512,)] + norm
    embeddings = [(30522, 512), (512, 512), (2, 512), *norm]
    return embeddings + 4 * layer + dense + dense + norm + [(30522,), (512, 2), (2,)]


SETS = {"bert-small": bert_small, "resnet50": resnet50}


def set_devices(count):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )


def make_strategy(count):
    if count == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def make_variables(strategy, shapes):
    with strategy.scope():
        return [keras.Variable(np.full(shape, 0.1, "float32"), aggregation="mean") for shape in shapes]


def make_gradients(strategy, shapes):
    """For each accumulation step a list of local variables with noise, another on each replica."""
    steps = ACCUMULATION_STEPS if strategy.num_replicas_in_sync == 1 else 1
    with strategy.scope():
        gradients = [[replicas.local_variable(shape, "float32", "gradient") for shape in shapes] for _ in range(steps)]

    def fill():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for seed, gradient in enumerate(variable for step in gradients for variable in step):
            gradient.assign(tf.random.stateless_normal(gradient.shape, (replica, seed)))

    tf.function(lambda: strategy.run(fill))()
    return gradients


def make_update(strategy, shapes, gradients, make_optimizer):
    """A function without arguments that makes one whole update."""
    variables = make_variables(strategy, shapes)
    with strategy.scope():
        optimizer = make_optimizer(**({"gradient_accumulation_steps": len(gradients)} if len(gradients) > 1 else {}))
        optimizer.build(variables)

    def on_replica():
        for step in gradients:
            optimizer.apply_gradients(zip(map(tf.convert_to_tensor, step), variables, strict=True))

    return tf.function(lambda: strategy.run(on_replica))


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def medians(functions, rounds):
    """Milliseconds of each of a dict of functions, run in turn."""
    times = [[seconds(function) for function in functions.values()] for _ in range(rounds)]
    return dict(zip(functions, np.median(times, axis=0) * 1e3, strict=True))


def benchmark_update(set_name, count, rounds, group):
    set_devices(count)
    strategy, shapes, group = make_strategy(count), SETS[set_name](), GROUPS[group]
    gradients = make_gradients(strategy, shapes)
    updates = {name: make_update(strategy, shapes, gradients, make) for name, make in group.items()}
    first = {name: seconds(update) for name, update in updates.items()}
    for update in updates.values():
        update()
    times = medians(updates, rounds)
    stock = next(iter(group))
    rows = []
    for name, ms in times.items():
        row = {"set": set_name, "replicas": count, "optimizer": name, "ms": ms, "stock": stock}
        row |= {"ratio": ms / times[stock], "first_call_s": first[name]}
        rows.append(row)
        print(f"| {set_name} | {count} | {name} | {ms:.0f} | {row['ratio']:.2f} | {first[name]:.1f} |", flush=True)
    return rows


def benchmark_parts(set_name, count, rounds):
    """The parts of VRLAMB's update, each a function of its own."""
    if count == 1:
        return []
    set_devices(count)
    strategy, shapes = make_strategy(count), SETS[set_name]()
    [gradients] = make_gradients(strategy, shapes)
    columns = {name: make_variables(strategy, shapes) for name in ("w", "p", "m", "v", "mean", "variance")}
    parameters = sum(int(np.prod(shape)) for shape in shapes)
    step = {"learning_rate": tf.constant(1e-4), "step": tf.constant(3.0), "finite": tf.constant(True)}

    def tensors(*names):
        values = {name: [tf.convert_to_tensor(v) for v in column] for name, column in columns.items()}
        values["gradient"] = [tf.convert_to_tensor(v) for v in gradients]
        return [values[name] for name in names]

    def once(function):
        """`function` of all variables on one replica, since the replicas share their memory."""

        def on_replica(*lists):
            return replicas.once(lambda *lists: [function(*row) for row in zip(*lists, strict=True)], *lists)

        return on_replica

    def ratio(variance, mean):
        r, defined = gsnr.gsnr(mean, variance, count)
        return programs.total(r), programs.total(tf.cast(defined, r.dtype))

    def rule(w, mean, variance, p, m, v, step):
        r, _ = gsnr.gsnr(mean, variance, count)
        p = rules.moving_average(p, tf.clip_by_value(r, 0.1, 1.0), 0.9, step["finite"])
        ghat = p * mean
        w, m, v = rules.lamb(
            w,
            ghat,
            ghat,
            m,
            v,
            step["learning_rate"],
            step["step"],
            None,
            step["finite"],
            beta_1=0.9,
            beta_2=0.999,
            epsilon=1e-6,
            adapt=True,
        )
        return w, p, m, v

    # What runs, and the words of 4 bytes that it has to move for each parameter, all replicas together.
    parts = {
        "reduction of the gradients": (lambda: replicas.all_reduce_sum(*tensors("gradient")), count + 1),
        "variance": (
            lambda: replicas.variance_of_samples(
                *tensors("gradient", "mean"), [None] * len(shapes), 1, call=programs.call
            ),
            count + 2,
        ),
        "finite check": (lambda: once(lambda mean: programs.call(rules.is_finite, mean))(*tensors("mean")), 1),
        "mean GSNR of the layers": (
            lambda: once(lambda *row: programs.call(ratio, *row))(*tensors("variance", "mean")),
            2,
        ),
        "rule, norms and averages": (
            lambda: once(lambda *row: programs.call(rule, *row, step))(
                *tensors("w", "mean", "variance", "p", "m", "v")
            ),
            13,
        ),
        "assignment": (
            lambda: replicas.assign(
                [v for name in ("w", "p", "m", "v") for v in columns[name]],
                [v for column in tensors("w", "p", "m", "v") for v in column],
            ),
            0,
        ),
        "a plain addition": (
            lambda: once(lambda a, b: programs.call(tf.add, a, b))(*tensors("w", "mean")),
            3,
        ),
    }

    def only(part):
        """The part in a step, with so much of its result that TensorFlow does not drop it."""

        def on_replica():
            results = tf.nest.flatten(part())
            return [tf.reshape(result, (-1,))[:1] for result in results if result is not None]

        return tf.function(lambda: strategy.run(on_replica))

    functions = {name: only(part) for name, (part, _) in parts.items()}
    functions["the whole update"] = make_update(strategy, shapes, [gradients], GROUPS[-1]["VRLAMB"])
    for function in functions.values():
        function()
        function()
    times = medians(functions, rounds)
    speed = parts["a plain addition"][1] * 4 * parameters / times["a plain addition"]
    rows = []
    for name, time_ms in times.items():
        words = parts[name][1] if name in parts else sum(words for _, words in parts.values()) - 3
        least = words * 4 * parameters / speed
        rows.append(
            {"set": set_name, "replicas": count, "part": name, "ms": time_ms, "words": words, "least_ms": least}
        )
        print(f"| {set_name} | {count} | {name} | {time_ms:.1f} | {words} | {least:.1f} |", flush=True)
    return rows


def transformer():
    """`(model, dataset)`: BERT-small that predicts 20 of 128 tokens."""
    vocabulary, width, length, predicted = 30522, 512, 128, 20
    tokens, positions = keras.Input((length,), dtype="int32"), keras.Input((predicted,), dtype="int32")
    table = keras.layers.Embedding(vocabulary, width)
    x = table(tokens) + keras.layers.Embedding(length, width)(keras.ops.arange(length))
    for _ in range(4):
        attention = keras.layers.MultiHeadAttention(8, width // 8)(x, x)
        x = keras.layers.LayerNormalization()(x + attention)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    x = keras.ops.take_along_axis(x, positions[..., None], axis=1)
    model = keras.Model((tokens, positions), keras.layers.Dense(vocabulary)(keras.layers.Dense(width)(x)))
    rng = np.random.default_rng(0)
    examples = 32
    data = (
        (
            rng.integers(vocabulary, size=(examples, length), dtype="int32"),
            np.sort(rng.permuted(np.tile(np.arange(length, dtype="int32"), (examples, 1)), axis=1)[:, :predicted]),
        ),
        rng.integers(vocabulary, size=(examples, predicted)),
    )
    return model, data


def resnet():
    """`(model, dataset)`: ResNet-50 on images of 224 x 224."""
    rng = np.random.default_rng(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3), classifier_activation=None)
    return model, (rng.normal(size=(16, 224, 224, 3)).astype("float32"), rng.integers(1000, size=16))


FITS = [
    ("ResNet-50, 16 images of 224 x 224", resnet, GROUPS[0], ("keras SGD(momentum)", "VRMomentum")),
    ("ResNet-50, 16 images of 224 x 224", resnet, GROUPS[0], ("LARS", "VRLARS")),
    ("BERT-small, 32 x 128 tokens", transformer, GROUPS[1], ("keras AdamW", "VRAdam")),
    ("BERT-small, 32 x 128 tokens", transformer, GROUPS[2], ("keras Lamb", "VRLAMB")),
    ("BERT-small, 32 x 128 tokens", transformer, GROUPS[2], ("LAMB", "VRLAMB")),
]


def make_fit_step(strategy, make_model, make_optimizer):
    with strategy.scope():
        model, data = make_model()
        model.compile(
            optimizer=make_optimizer(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[]
        )
    dataset = tf.data.Dataset.from_tensors(data).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    model.make_train_function()
    return lambda: model.train_function(iterator)


def benchmark_fit(rounds, case, count=2):
    set_devices(count)
    strategy = make_strategy(count)
    title, make_model, group, (plain, vr) = FITS[case]
    steps = {name: make_fit_step(strategy, make_model, group[name]) for name in (plain, vr)}
    for step in steps.values():
        step()
        step()
    times = medians(steps, rounds)
    ratio = times[vr] / times[plain]
    print(f"| {title} | {plain} | {times[plain]:.0f} | {vr} | {times[vr]:.0f} | {ratio:.3f} |", flush=True)
    return [{"model": title, "plain": plain, "vr": vr, "ms": times, "ratio": ratio}]


def run(function, cases):
    """The rows of all cases, each in a process of its own, since TensorFlow keeps the memory of one for the next."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [row for case in cases for row in pool.apply(function, case)]


def header(*columns):
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", default="update,parts,fit", help="of update, parts, fit")
    parser.add_argument("--sets", default=",".join(SETS), help=f"sets of variables, of {', '.join(SETS)}")
    parser.add_argument("--replicas", default="1,2,4,8", help="numbers of logical CPU devices")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the rows to")
    arguments = parser.parse_args()
    what, counts = arguments.what.split(","), [int(count) for count in arguments.replicas.split(",")]
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} cores")
    cases = [(name, count, arguments.rounds) for name in arguments.sets.split(",") for count in counts]
    results = {}
    if "update" in what:
        header("set", "replicas", "optimizer", "ms", "ratio to stock", "first call, s")
        results["update"] = run(benchmark_update, [(*case, i) for case in cases for i in range(len(GROUPS))])
    if "parts" in what:
        header("set", "replicas", "part of VRLAMB", "ms", "least words", "their time, ms")
        results["parts"] = run(benchmark_parts, cases)
    if "fit" in what:
        header("model", "plain", "ms", "VR", "ms", "ratio")
        results["fit"] = run(benchmark_fit, [(arguments.rounds, i) for i in range(len(FITS))])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
