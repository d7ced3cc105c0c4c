"""Writes event files for TensorBoard, which is installed with TensorFlow."""

import json
from pathlib import Path
from typing import Any

from tff_pdp.trackers.base import RoundReport, RunFacts


class TensorBoard:
    """Writes one event file for each command that trains; `tensorboard --logdir OUTPUT/tensorboard` shows all runs."""

    def __init__(self, folder: Path | None):
        """Stores the folder of the event files; None for the folder `tensorboard` in the experiment's folder."""
        self._folder = folder
        self._writer: Any = None

    def began(self, run: RunFacts) -> None:
        """Opens a new event file, and writes the run's settings as text."""
        # Imported by whoever trains; a check of settings does without.
        import tensorflow as tf

        folder = run.beside("tensorboard") if self._folder is None else self._folder / run.method
        self._writer = tf.summary.create_file_writer(str(folder))
        # Indented text is shown as it is.
        text = "".join(f"    {line}\n" for line in json.dumps(run.settings, indent=2, ensure_ascii=False).splitlines())
        with self._writer.as_default(step=run.round_number):
            tf.summary.text("settings", text)
        self._writer.flush()

    def round_done(self, report: RoundReport) -> None:
        """Writes the round's scalars, at once, so that a running training can be watched."""
        import tensorflow as tf

        with self._writer.as_default(step=report.round_number):
            for name, value in report.scalars().items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def ended(self, run: RunFacts) -> None:
        """Closes the event file."""
        del run
        self._writer.close()


def build_tensorboard(*, folder: str = "") -> TensorBoard:
    """Builds a tracker that writes event files for TensorBoard.

    Args:
      folder: folder for the event files, in a folder for each method; by default `tensorboard` in the experiment's
        folder.
    """
    return TensorBoard(Path(folder) if folder else None)
