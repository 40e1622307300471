"""Handwritten digits with a large batch: an optimizer against its VR counterpart, from the same weights.

scikit-learn's 1,797 real digits (8 x 8 pixels), a network with two hidden layers, the batch split over 8 replicas. It
compares, over several seeds, and says what the numbers show. Needs no download and no accelerator.

    python -m tpu_scripts.digits
    python -m tpu_scripts.digits --optimizer=VRAdam --noise_pixels=400 --global_batch_size=512

On one host with GPUs or a TPU the same line uses them; `--tpu=NAME` connects to a TPU by name.
"""

import json
import os

import keras
import matplotlib
import numpy as np
import scipy.stats
import tensorflow as tf
from absl import app, flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vrgd_tf
from tpu_scripts import runtime
from vrgd_tf import gsnr, replicas

matplotlib.use("Agg")

# The plain optimizer to compare with, and the arguments of both, at which it trains well here.
OPTIMIZERS = {
    "VRSGD": (keras.optimizers.SGD, {"learning_rate": 0.5}),
    "VRMomentum": (keras.optimizers.SGD, {"learning_rate": 0.1, "momentum": 0.9}),
    "VRAdam": (keras.optimizers.Adam, {"learning_rate": 0.003}),
    "VRLARS": (vrgd_tf.LARS, {"learning_rate": 0.2, "trust_coefficient": 0.1}),
    "VRLAMB": (vrgd_tf.LAMB, {"learning_rate": 0.01}),
}
TRAIN_SIZE = 1024
HIDDEN = 64

_OPTIMIZER = flags.DEFINE_enum("optimizer", "VRMomentum", list(OPTIMIZERS), "The VR optimizer to compare.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Of both optimizers. Default: one that suits the plain one.")
_BATCH = flags.DEFINE_integer("global_batch_size", 512, f"Examples in a step, at most {TRAIN_SIZE}.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 60, "Passes over the training set.", lower_bound=1)
_REPLICAS = flags.DEFINE_integer("replicas", 8, "Over how many the batch is split.", lower_bound=2)
_RUNS = flags.DEFINE_integer("runs", 5, "Seeds, each with weights and an order of the data of its own.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "The first seed.")
_NOISE_PIXELS = flags.DEFINE_integer(
    "noise_pixels", 0, "How many pixels of pure noise to append to each image: an artificial setting.", lower_bound=0
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "results/digits", "Where metrics, models and the plot go.")
_TPU = flags.DEFINE_string("tpu", None, "The TPU to connect to, by name, or 'local' on a TPU VM.")


def load_data(noise_pixels, seed=0):
    """`((x, y), (x, y))` to train and to test: x float32 [n, 64 + noise_pixels] of unit scale, y int64 [n]."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(len(digits.data), noise_pixels))
    x = np.concatenate([(digits.data - digits.data.mean()) / digits.data.std(), noise], axis=1).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, digits.target, train_size=TRAIN_SIZE, stratify=digits.target, random_state=seed
    )
    return (x_train, y_train), (x_test, y_test)


def make_model(inputs):
    """A network from `inputs` pixels to the logits of 10 digits."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(HIDDEN, activation="relu", name="hidden_1"),
            keras.layers.Dense(HIDDEN, activation="relu", name="hidden_2"),
            keras.layers.Dense(10, name="logits"),
        ]
    )


class RatioRecorder(keras.callbacks.Callback):
    """Measures the GSNR ratio on one batch after each epoch: its mean over each kernel, in `ratios`."""

    def __init__(self, x, y):
        super().__init__()
        self.batch = (x, y)
        self.ratios = []

    def on_train_begin(self, logs=None):
        strategy = self.model.distribute_strategy
        kernels = [v for v in self.model.trainable_variables if v.name == "kernel"]
        size = len(self.batch[0]) // strategy.num_replicas_in_sync
        gamma, ratio_max = self.model.optimizer.gamma, self.model.optimizer.ratio_max

        def on_replica(x, y):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            part = tf.range(replica * size, (replica + 1) * size)
            with tf.GradientTape() as tape:
                loss = self.model.compute_loss(
                    y=tf.gather(y, part), y_pred=self.model(tf.gather(x, part), training=True)
                )
            samples = tape.gradient(loss, kernels)
            gradients = replicas.all_reduce_sum(samples)
            variances = replicas.variance_of_samples(samples, gradients, [None] * len(kernels), 1)
            means = []
            for gradient, variance in zip(gradients, variances, strict=True):
                r, defined = gsnr.gsnr(gradient, variance, strategy.num_replicas_in_sync)
                means.append(tf.reduce_mean(gsnr.layer_ratio(r, defined, gamma, ratio_max)))
            return tf.stack(means)

        @tf.function
        def measure(x, y):
            return strategy.run(on_replica, args=(x, y))

        self.layers = [v.path.split("/")[-2] for v in kernels]
        self.measure = lambda: strategy.experimental_local_results(measure(*map(tf.constant, self.batch)))[0].numpy()
        self.ratios = []

    def on_epoch_end(self, epoch, logs=None):
        self.ratios.append(self.measure().tolist())


class Curves(keras.callbacks.Callback):
    """Measures loss and accuracy on all of the train and the test set after each epoch."""

    def __init__(self, train, test):
        super().__init__()
        self.sets = {"train": train, "test": test}
        self.losses = {"train": [], "test": []}
        self.accuracies = {"train": [], "test": []}

    def on_train_begin(self, logs=None):
        if hasattr(self.model, "measure"):
            return

        @tf.function
        def measure(x, y):
            logits = self.model(x)
            accuracy = tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(y, logits))
            return self.model.compute_loss(y=y, y_pred=logits), accuracy

        self.model.measure = measure

    def on_epoch_end(self, epoch, logs=None):
        for key, (x, y) in self.sets.items():
            loss, accuracy = self.model.measure(tf.constant(x), tf.constant(y))
            self.losses[key].append(float(loss))
            self.accuracies[key].append(float(accuracy))


class Trainer:
    """One compiled model that is trained again and again from given weights, so that it compiles once."""

    def __init__(self, strategy, optimizer, inputs):
        with strategy.scope():
            self.model = make_model(inputs)
            self.model.compile(
                optimizer=optimizer(),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            self.model.optimizer.build(self.model.trainable_variables)
        self.new = [v.numpy() for v in self.model.optimizer.variables]

    def run(self, seed, train, test, batch, epochs, callbacks, rate=1.0):
        """Trains from the weights of `seed`; returns the losses after each epoch and the measures at the end.

        `rate` multiplies the learning rate.
        """
        keras.utils.set_random_seed(seed)
        weights = make_model(train[0].shape[1]).get_weights()
        self.model.set_weights(weights)
        for variable, value in zip(self.model.optimizer.variables, self.new, strict=True):
            variable.assign(value)
        self.model.optimizer.learning_rate = rate * float(self.model.optimizer.learning_rate.numpy())
        # Repeated, because each pass over a distributed dataset takes Keras longer to start than to run here.
        data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=seed).repeat()
        curves = Curves(train, test)
        self.model.fit(
            data.batch(batch, drop_remainder=True),
            epochs=epochs,
            steps_per_epoch=len(train[0]) // batch,
            shuffle=False,
            verbose=0,
            callbacks=[curves, *callbacks],
        )
        return {
            "curves": curves.losses,
            "train_loss": curves.losses["train"][-1],
            "test_loss": curves.losses["test"][-1],
            "test_accuracy": curves.accuracies["test"][-1],
            "generalization_gap": curves.losses["test"][-1] - curves.losses["train"][-1],
        }


def steps_to(target, run, steps_per_epoch):
    """Steps until the training loss, measured after each epoch, is at most `target`."""
    return (1 + next(i for i, loss in enumerate(run["curves"]["train"]) if loss <= target)) * steps_per_epoch


def mean_and_error(values):
    """The mean of `values` and its standard error."""
    return np.mean(values), scipy.stats.sem(values)


def conclusion(vr_runs, plain_runs, name, plain_name):
    """What the paired differences over the seeds show, in sentences."""
    seeds = len(vr_runs)
    sentences = []
    for key, text in [
        ("test_loss", "test loss"),
        ("test_accuracy", "test accuracy"),
        ("generalization_gap", "generalization gap"),
    ]:
        pairs = zip(vr_runs, plain_runs, strict=True)
        difference, error = mean_and_error([vr[key] - plain[key] for vr, plain in pairs])
        shown = f"{text}: {name} minus {plain_name} is {difference:+.4f} +- {error:.4f}"
        # Student's t, paired: with few seeds, two standard errors are not yet a difference.
        if abs(difference) <= error * scipy.stats.t.ppf(0.975, seeds - 1):
            sentences.append(f"{shown}: no difference that {seeds} seeds can show.")
        else:
            better = (difference > 0) == (key == "test_accuracy")
            sentences.append(f"{shown}: {name} is {'better' if better else 'worse'} here.")
    return sentences


def plot(path, runs, layers, ratios, names, title):
    """The loss curves, means over the seeds, beside the ratio of each layer."""
    from matplotlib import pyplot as plt

    figure, (losses, ratio_axis) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    for key, color in [("plain", "tab:gray"), ("short", "tab:orange"), ("vr", "tab:blue")]:
        for part, style in [("train", "--"), ("test", "-")]:
            curve = np.mean([run["curves"][part] for run in runs[key]], axis=0)
            epochs = np.arange(1, len(curve) + 1)
            losses.plot(epochs, curve, style, color=color, label=f"{names[key]}, {part}")
    losses.set(xlabel="epoch", ylabel="loss (nats), mean over seeds", yscale="log")
    losses.legend()
    for layer, ratio in zip(layers, np.transpose(ratios), strict=True):
        ratio_axis.plot(np.arange(1, len(ratio) + 1), ratio, label=layer)
    ratio_axis.set(xlabel="epoch", ylabel="mean GSNR ratio of the kernel", ylim=(0, 1.05))
    ratio_axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.ERROR)
    console = Console(highlight=False)
    strategy, devices = runtime.make_strategy(_REPLICAS.value, _TPU.value)
    count, batch = strategy.num_replicas_in_sync, _BATCH.value
    if batch % count or batch > TRAIN_SIZE:
        raise app.UsageError(
            f"--global_batch_size must be a multiple of the {count} replicas, at most {TRAIN_SIZE}. Received: {batch}"
        )
    output = _OUTPUT_DIR.value
    os.makedirs(output, exist_ok=True)
    name = _OPTIMIZER.value
    plain, arguments = OPTIMIZERS[name]
    if _LEARNING_RATE.value is not None:
        arguments = arguments | {"learning_rate": _LEARNING_RATE.value}
    shown = ", ".join(f"{argument}={value:g}" for argument, value in arguments.items())
    names = {"plain": plain.__name__, "vr": name}
    train, test = load_data(_NOISE_PIXELS.value)
    inputs = train[0].shape[1]
    setting = f"{TRAIN_SIZE} digits to train, {len(test[0])} to test"
    if _NOISE_PIXELS.value:
        setting += f", {_NOISE_PIXELS.value} pixels of pure noise appended to each (artificial)"
    console.print(f"{setting}. Batch {batch}, {batch // count} on each of {count} replicas: {devices}.")

    classes = {"plain": plain, "vr": getattr(vrgd_tf, name)}
    trainers = {key: Trainer(strategy, lambda cls=cls: cls(**arguments), inputs) for key, cls in classes.items()}
    recorder = RatioRecorder(train[0][:batch], train[1][:batch])
    runs = {"plain": [], "vr": []}
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task("", total=3 * _RUNS.value * _EPOCHS.value)
        advance = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: progress.advance(task))
        for seed in range(_SEED.value, _SEED.value + _RUNS.value):
            for key, trainer in trainers.items():
                progress.update(task, description=f"seed {seed}, {names[key]}")
                # Of one run: the plot shows one, and the measure costs a gradient.
                record = [recorder] if key == "vr" and seed == _SEED.value else []
                runs[key].append(trainer.run(seed, train, test, batch, _EPOCHS.value, [advance, *record]))
        # Now, since the control trains the plain model once more.
        for key, trainer in trainers.items():
            trainer.model.save(os.path.join(output, f"{key}.keras"))
        # The control: steps as short as those of the VR optimizer, without what it knows.
        ratio = float(np.mean(recorder.ratios))
        names["short"] = f"{names['plain']}, rate x {ratio:.2f}"
        runs["short"] = []
        for seed in range(_SEED.value, _SEED.value + _RUNS.value):
            progress.update(task, description=f"seed {seed}, {names['short']}")
            runs["short"].append(trainers["plain"].run(seed, train, test, batch, _EPOCHS.value, [advance], ratio))

    steps_per_epoch = TRAIN_SIZE // batch
    target = max(run["train_loss"] for key in runs for run in runs[key])  # so that every run reaches it
    table = Table(title=f"{shown}; {_EPOCHS.value} epochs, mean +- standard error over {_RUNS.value} seeds")
    table.add_column("")
    for key in runs:
        table.add_column(names[key], justify="right")
    for key, label in [
        ("train_loss", "train loss"),
        ("test_loss", "test loss"),
        ("test_accuracy", "test accuracy"),
        ("generalization_gap", "generalization gap (test - train loss)"),
    ]:
        cells = ["{:.4f} +- {:.4f}".format(*mean_and_error([run[key] for run in runs[k]])) for k in runs]
        table.add_row(label, *cells)
    for key in runs:
        for run in runs[key]:
            run["steps_to_target"] = steps_to(target, run, steps_per_epoch)
    cells = ["{:.0f} +- {:.0f}".format(*mean_and_error([run["steps_to_target"] for run in runs[k]])) for k in runs]
    table.add_row(f"steps to train loss {target:.4f}", *cells)
    console.print(table)

    sentences = [
        f"{name} scaled its gradients by {ratio:.2f} in the mean. The last column is {names['plain']} with its "
        "learning rate times that: steps as short, without the signal-to-noise ratio. A gain over both is the method's."
    ]
    for key in ("plain", "short"):
        sentences += conclusion(runs["vr"], runs[key], name, names[key])
    sentences.append("The generalization gaps are those at different train losses; see the first row.")
    if _NOISE_PIXELS.value:
        sentences.append("Pixels of pure noise are an artificial setting, chosen because the method helps in it.")
    for sentence in sentences:
        console.print(f"- {sentence}")

    metrics = {
        "setting": {
            "optimizer": name,
            "plain_optimizer": names["plain"],
            "arguments": arguments,
            "global_batch_size": batch,
            "replicas": count,
            "devices": devices,
            "epochs": _EPOCHS.value,
            "seeds": list(range(_SEED.value, _SEED.value + _RUNS.value)),
            "noise_pixels": _NOISE_PIXELS.value,
            "train_size": TRAIN_SIZE,
            "test_size": len(test[0]),
            "versions": {"vrgd_tf": vrgd_tf.__version__, "keras": keras.__version__, "tensorflow": tf.__version__},
        },
        "runs": runs,
        "target_train_loss": target,
        "ratio_per_layer": {"layers": recorder.layers, "after_each_epoch": recorder.ratios},
        "conclusion": sentences,
    }
    with open(os.path.join(output, "metrics.json"), "w") as file:
        json.dump(metrics, file, indent=1)
    plot(os.path.join(output, "digits.png"), runs, recorder.layers, recorder.ratios, names, setting)
    console.print(f"Written to {output}: metrics.json, plain.keras, vr.keras, digits.png")


if __name__ == "__main__":
    app.run(main)
