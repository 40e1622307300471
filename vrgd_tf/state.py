"""What a checkpoint holds of an optimizer beside its variables: what the state is of, and a half-finished accumulation.

No variable has a replica dimension, so that state loads on any number of replicas. Only between the steps of an
accumulation each replica has statistics of its own; then, and only then, a checkpoint holds those of all replicas.

State is a dict from keys to arrays. Everything here is a pure function of such data, or of descriptions of it.
"""

import io
import json

import numpy as np
import tensorflow as tf

_DESCRIPTION = "description"


class PythonState(tf.train.experimental.PythonState):
    """Lets `tf.train.Checkpoint` hold arrays that `save()` returns, and give them to `restore(arrays)`.

    It restores them before any variable, so that `restore` may still refuse the checkpoint.
    """

    def __init__(self, save, restore):
        self._save = save
        self._restore = restore

    def serialize(self):
        file = io.BytesIO()
        np.savez(file, **self._save())
        return file.getvalue()

    def deserialize(self, string_value):
        with np.load(io.BytesIO(string_value)) as arrays:
            self._restore(dict(arrays))


def with_description(description, arrays):
    """`arrays` and a JSON text in them, as bytes, since not all formats hold text."""
    return arrays | {_DESCRIPTION: np.frombuffer(json.dumps(description).encode(), np.uint8)}


def description_of(arrays):
    """The description in `arrays`, None if there is none."""
    text = arrays.get(_DESCRIPTION)
    return None if text is None else json.loads(np.asarray(text).tobytes())


def differences(saved, own):
    """What keeps the state that `saved` describes from an optimizer that `own` describes: a list of sentences.

    Args:
        saved, own: dicts with "rule", the name of the update rule; "gradient_accumulation_steps", int or None;
            "variables", a list of (path, shape), and "slots", a dict from slot names to the indices of the variables
            that have them, both empty before the optimizer is built.
    """
    found = [
        f"{name}: saved with {saved[name]}, here {own[name]}"
        for name in ("rule", "gradient_accumulation_steps")
        if saved[name] != own[name]
    ]
    if not saved["variables"] or not own["variables"]:
        return found
    if len(saved["variables"]) != len(own["variables"]):
        return [*found, f"variables: saved {_names(saved)}, here {_names(own)}"]
    found += [
        f"shape of {own_path}: saved {tuple(saved_shape)}, here {tuple(own_shape)}"
        for (_, saved_shape), (own_path, own_shape) in zip(saved["variables"], own["variables"], strict=True)
        if list(saved_shape) != list(own_shape)
    ]
    for slot in sorted(saved["slots"].keys() | own["slots"].keys()):
        of_saved, of_own = saved["slots"].get(slot, []), own["slots"].get(slot, [])
        if of_saved != of_own:
            found.append(f"slot {slot}: saved for {_names(saved, of_saved)}, here for {_names(own, of_own)}")
    return found


def _names(description, indices=None):
    variables = description["variables"]
    paths = [variables[i][0] for i in (range(len(variables)) if indices is None else indices)]
    shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    return f"{len(paths)} variables ({shown})" if paths else "no variable"


def merge(means, squared_deviations, steps, replicas):
    """The same statistics on another number of replicas; their sum of squared deviations and mean stay as they are.

    Args:
        means: array [saved replicas, ...], each replica's mean of its samples.
        squared_deviations: array of the same shape, each replica's sum of squared deviations from its mean, or None.
        steps: int, samples of one replica.
        replicas: int, the other number.

    Returns:
        `(means, squared_deviations)` as long as `replicas`. A sample is divided by the number of replicas, so that
        the sum over the replicas is the mean gradient: the number changes the unit.
    """

    def on_each(value):
        return np.broadcast_to(value.astype(means.dtype), (replicas, *value.shape))

    exact = means.astype(np.float64)
    total = exact.sum(0)
    if squared_deviations is None:
        return on_each(total / replicas), None
    saved_replicas = len(means)
    within = saved_replicas**2 * squared_deviations.astype(np.float64).sum(0)
    between = steps * np.square(saved_replicas * exact - total).sum(0)
    return on_each(total / replicas), on_each((within + between) / (saved_replicas * replicas**2))
