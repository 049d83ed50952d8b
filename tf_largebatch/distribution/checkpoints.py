"""Checkpoints of a training run: written whole or not at all, read only if whole, the same on all workers.

    folder/step_00000120/variables.index, .data-...   TensorFlow's format, with a checksum of every tensor
    folder/step_00000120/about.json                   what they are: step, epoch, names and shapes

A checkpoint is written beside the others under another name and then renamed, so that a process that is
killed, or a disk that is full, leaves those before it as they were. Variables are saved without their copies
on replicas: any number of replicas can go on from there.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import logging

from tf_largebatch._keras import tf
from tf_largebatch.distribution import worker_sums
from tf_largebatch.validation import InputError

_NAME = re.compile(r"step_(\d{8,})")
_DRAFT = "draft"
# Where nothing can be written.
_NOWHERE = "/dev/null/nowhere"
_VARIABLES, _ABOUT = "variables", "about.json"
# TensorFlow raises what fits the fault: IndexError for a file that is too short.
_UNREADABLE = (OSError, ValueError, LookupError, AssertionError, tf.errors.OpError)

# (name, variable) pairs; names tell a user which layer differs, the order is what counts.
Named = Sequence[tuple[str, tf.Variable]]


class Checkpoints:
    """The checkpoints in one folder, which all workers see; every worker calls every method.

    Args:
      folder: a path of any file system that `tf.io.gfile` knows; made by the first save.
      strategy: of the workers. Its chief writes.
      keep: how many are kept; with 1, a damaged one leaves nothing to go on from.
    """

    def __init__(self, folder: str, strategy: tf.distribute.Strategy, keep: int = 2):
        self.folder = folder
        self._strategy = strategy
        self._keep = keep

    def save(self, step: int, variables: Named, metrics: Named, about: dict[str, Any]) -> str | None:
        """Saves, as `step_N`, and removes the oldest ones.

        Args:
          step: global step.
          variables: all that training changes.
          metrics: those of the running epoch's metrics.
          about: more to be told by `restore`; JSON.

        Returns:
          Its path, or None where the disk or the file system would not have it; a warning says so.
        """
        content = {"step": step, "variables": _described(variables), "metrics": _described(metrics), **about}
        is_chief, scratch, failure = worker_sums.is_chief(self._strategy), None, None
        try:
            # Reading variables that are kept per replica is a collective act: every worker takes part, and
            # only the chief's file is kept.
            scratch = None if is_chief else tempfile.mkdtemp(prefix="not_chief_")
            draft = scratch or self._empty_draft()
        except _UNREADABLE as error:
            # It takes part all the same.
            draft, failure = _NOWHERE, error
        try:
            _checkpoint(variables=variables, metrics=metrics).write(f"{draft}/{_VARIABLES}")
        except _UNREADABLE as error:
            failure = failure or error
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        is_saved = is_chief and self._finished(step, content, failure)
        # All wait for the chief, and know alike whether this step is saved.
        return self.path(step) if worker_sums.of_chief(self._strategy, int(is_saved)) else None

    def restore(self, variables: Named, needed: Sequence[str] = ()) -> dict[str, Any] | None:
        """Gives the variables what the newest whole checkpoint holds.

        Damaged ones are passed over, with a warning, on all workers alike.

        Args:
          variables: as they were saved.
          needed: names of facts without which a checkpoint is not whole.

        Returns:
          What was saved about it, with "step" and "path"; None if there is no whole checkpoint.

        Raises:
          InputError: the checkpoint is of other variables than these, or the workers do not see the same files.
        """
        tried: set[int] = set()
        while True:
            steps = [step for step in self.steps() if step not in tried]
            step = worker_sums.of_chief(self._strategy, steps[-1] if steps else -1)
            if step < 0:
                return None
            tried.add(step)
            path = self.path(step)
            try:
                about = _read(path, needed)
                _check_same(path, about, variables)
                status = _checkpoint(variables=variables).read(f"{path}/{_VARIABLES}")
                status.assert_existing_objects_matched()
                # Or TensorFlow would warn that nobody asks for the metrics.
                status.expect_partial()
                failure = None
            except InputError:
                raise
            except _UNREADABLE as error:
                failure = error
            workers = worker_sums.num_workers(self._strategy)
            if worker_sums.total(self._strategy, [int(failure is None)])[0] == workers:
                return {**about, "path": path}
            reason = _first_line(failure) if failure else "another worker cannot read it"
            logging.warning("The checkpoint %s is damaged (%s); trying the one before it.", path, reason)

    def metrics(self, path: str, count: int) -> list[Any]:
        """The saved values of the first `count` variables of the metrics, as arrays."""
        reader = tf.train.load_checkpoint(f"{path}/{_VARIABLES}")
        return [reader.get_tensor(f"metrics/{index}/.ATTRIBUTES/VARIABLE_VALUE") for index in range(count)]

    def steps(self) -> list[int]:
        """Global steps of the checkpoints in the folder, damaged or not, oldest first."""
        if not tf.io.gfile.isdir(self.folder):
            return []
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self.folder))
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def path(self, step: int) -> str:
        return f"{self.folder}/step_{step:08}"

    def _empty_draft(self) -> str:
        draft = f"{self.folder}/{_DRAFT}"
        if tf.io.gfile.exists(draft):
            tf.io.gfile.rmtree(draft)
        tf.io.gfile.makedirs(draft)
        return draft

    def _finished(self, step: int, content: dict[str, Any], failure: Exception | None) -> bool:
        """On the chief: puts the draft in its place, or away; tells which."""
        path, draft = self.path(step), f"{self.folder}/{_DRAFT}"
        try:
            if failure is not None:
                raise failure
            with tf.io.gfile.GFile(f"{draft}/{_ABOUT}", "w") as file:
                file.write(json.dumps(content))
            if tf.io.gfile.exists(path):
                tf.io.gfile.rmtree(path)
            tf.io.gfile.rename(draft, path)
        except _UNREADABLE as error:
            logging.warning("Step %d could not be saved in %s: %s", step, self.folder, _first_line(error))
            self._remove(draft)
            return False
        # Those of later steps are damaged, or training would have gone on from them.
        later = [other for other in self.steps() if other > step]
        for old in [*later, *[other for other in self.steps() if other <= step][: -self._keep]]:
            self._remove(self.path(old))
        return True

    def _remove(self, path: str) -> None:
        try:
            if tf.io.gfile.exists(path):
                tf.io.gfile.rmtree(path)
        except _UNREADABLE as error:
            logging.warning("%s could not be removed: %s", path, _first_line(error))


def _checkpoint(**parts: Named) -> tf.train.Checkpoint:
    # By place and not by object, so that a Keras 3 model, whose objects hold much else, is read as it is written.
    return tf.train.Checkpoint(**{name: [variable for _, variable in part] for name, part in parts.items()})


def _described(variables: Named) -> list[list[Any]]:
    return [[name, list(variable.shape), variable.dtype.name] for name, variable in variables]


def _read(path: str, needed: Sequence[str]) -> dict[str, Any]:
    with tf.io.gfile.GFile(f"{path}/{_ABOUT}") as file:
        about = json.load(file)
    if not isinstance(about, dict) or not isinstance(about.get("step"), int) or not about.get("variables"):
        raise ValueError(f"{_ABOUT} is not complete")
    for name in needed:
        if name not in about:
            raise ValueError(f"{_ABOUT} has no {name!r}")
    return about


def _check_same(path: str, about: dict[str, Any], variables: Named) -> None:
    saved, own = about["variables"], _described(variables)
    for (saved_name, *saved_kind), (name, *kind) in zip(saved, own):
        if saved_kind != kind:
            raise InputError(
                f"the checkpoint {path} is of another model or optimizer: {saved_name} is {saved_kind[1]} of shape "
                f"{saved_kind[0]} there, and {name} is {kind[1]} of shape {kind[0]} here; choose another folder."
            )
    if len(saved) != len(own):
        raise InputError(
            f"the checkpoint {path} is of another model or optimizer: it holds {len(saved)} variables, and here are "
            f"{len(own)}; choose another folder."
        )


def _first_line(error: Exception | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
