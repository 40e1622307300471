"""Keras callbacks."""

import os
import re
import warnings

import keras
import tensorflow as tf

_BACKUP = re.compile(r"epoch-(\d+)\.weights\.h5")
_UNFINISHED = "unfinished.weights.h5"


class BackupAndRestore(keras.callbacks.Callback):
    """Saves weights and optimizer after each epoch, and goes on from there when training starts again.

    Like `keras.callbacks.BackupAndRestore`, but a kill at any moment, also while saving, costs no more than the epoch
    it falls into: a backup is one file, which gets its name when it is whole, and the one before it stays until then.
    A file that cannot be read is passed over, with a warning, for the one before it. On a deterministic input the run
    ends with the weights of one that was not interrupted, bit for bit on as many replicas.

    An epoch is the unit: Keras starts epochs at their first batch. For more frequent backups give `fit` fewer
    `steps_per_epoch`. With `gradient_accumulation_steps` a backup is larger where the epoch ends in the midst of an
    accumulation, by what each replica has accumulated: let the number of batches be a multiple of the steps.

    Args:
        backup_dir: str or path, local or gs://, of this run alone; it is made if it is missing.
        keep: int >= 1, how many backups stay.
        delete_checkpoint: bool, whether to remove all backups when training ends by itself.

    Raises:
        ValueError: for an argument out of its range; when training starts, if there are backups but none that fits
            the model and its optimizer, with the reasons.

    Example:

    >>> callback = vrgd_tf.BackupAndRestore("/tmp/backup")
    """

    def __init__(self, backup_dir, keep=2, delete_checkpoint=True):
        super().__init__()
        self.backup_dir = os.fspath(backup_dir) if backup_dir else backup_dir
        if not isinstance(self.backup_dir, str) or not self.backup_dir:
            raise ValueError(f"`backup_dir` must be the path of a directory. Received: backup_dir={backup_dir!r}")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"`keep` must be an integer >= 1. Received: keep={keep!r}")
        self.keep = keep
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs=None):
        if not self.model.built:
            raise ValueError("BackupAndRestore needs a model that is built: call it on a batch, or give it an Input.")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._clear_unfinished()
        failures = []
        for epoch in reversed(self._epochs()):
            try:
                self.model.load_weights(self._path(epoch))
            except Exception as error:  # h5py raises OSError, KeyError and RuntimeError on damaged files.
                failures.append(f"{self._path(epoch)}: {error}")
                continue
            if failures:
                warnings.warn(
                    f"Training goes on after epoch {epoch}, from an earlier backup, since later ones could not be "
                    f"restored. {' '.join(failures)}",
                    stacklevel=2,
                )
            self.model._initial_epoch = epoch  # Keras' way for callbacks to say where to start.
            return
        if failures:
            raise ValueError(
                f"No backup in {self.backup_dir} could be restored. Remove them to start from the beginning. "
                f"{' '.join(failures)}"
            )

    def on_epoch_end(self, epoch, logs=None):
        tf.io.gfile.makedirs(self.backup_dir)
        unfinished = self._join(_UNFINISHED)
        self.model.save_weights(unfinished, overwrite=True)
        tf.io.gfile.rename(unfinished, self._path(epoch + 1), overwrite=True)
        # Backups beyond this epoch are of a run that was started anew.
        kept = [other for other in self._epochs() if other <= epoch + 1][-self.keep :]
        for other in set(self._epochs()) - set(kept):
            tf.io.gfile.remove(self._path(other))

    def on_train_end(self, logs=None):
        self.model._initial_epoch = None  # Else the next call of fit would start there too.
        if self.delete_checkpoint:
            for epoch in self._epochs():
                tf.io.gfile.remove(self._path(epoch))

    def _clear_unfinished(self):
        if tf.io.gfile.exists(self._join(_UNFINISHED)):
            warnings.warn(
                f"The last backup in {self.backup_dir} was not finished; the one before it is used.", stacklevel=3
            )
            tf.io.gfile.remove(self._join(_UNFINISHED))

    def _epochs(self):
        """How many epochs were done in each backup, in ascending order."""
        if not tf.io.gfile.isdir(self.backup_dir):
            return []
        matches = (_BACKUP.fullmatch(name) for name in tf.io.gfile.listdir(self.backup_dir))
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, epoch):
        return self._join(f"epoch-{epoch:06d}.weights.h5")

    def _join(self, name):
        return f"{self.backup_dir.rstrip('/')}/{name}"
