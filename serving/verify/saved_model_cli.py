"""TensorFlow's `saved_model_cli` run inside this process: each command would import TensorFlow again."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from absl.testing import flagsaver
from tensorflow.python.tools import saved_model_cli

from tff_pdp.errors import ServingError


def show(export_dir: Path) -> str:
    """`show --all`: builds every function of the object graph, without running any.

    Returns:
      What it prints: the signatures and functions of the export.

    Raises:
      ServingError: the command fails.
    """
    return _run(export_dir, "show", "--all")


def scan(export_dir: Path) -> None:
    """`scan`: TensorFlow's own look for ops that read and write files.

    Raises:
      ServingError: the command finds one, which it only says, or fails.
    """
    text = _run(export_dir, "scan")
    if "does not contain the default denylisted ops" not in text or "contains the following denylisted ops" in text:
        raise ServingError(f"{export_dir}: saved_model_cli scan finds what it forbids: {text.strip()}")


def run(
    export_dir: Path, signature_name: str, inputs: Mapping[str, np.ndarray], scratch: Path
) -> dict[str, np.ndarray]:
    """`run`: loads the export once more and runs one signature on inputs from a file.

    Args:
      export_dir: the directory of one version.
      signature_name: the signature that is called.
      inputs: an array for each of its inputs.
      scratch: a directory for the files in between.

    Returns:
      The answers by their keys.

    Raises:
      ServingError: the command fails.
    """
    file, answers = scratch / "inputs.npz", scratch / "answers"
    # Strings are pickled here, by the process that reads them: NumPy's own would lose zero bytes at their ends.
    np.savez(file, **{f"input_{index}": array for index, array in enumerate(inputs.values())})
    named = ";".join(f"{key}={file}[input_{index}]" for index, key in enumerate(inputs))
    _run(
        export_dir,
        "run",
        f"--tag_set={tf.saved_model.SERVING}",
        f"--signature_def={signature_name}",
        f"--inputs={named}",
        f"--outdir={answers}",
        "--overwrite",
    )
    return {path.stem: np.load(path, allow_pickle=True) for path in answers.glob("*.npy")}


def _run(export_dir: Path, command: str, *arguments: str) -> str:
    printed = io.StringIO()
    # The flags are global to the process; whatever one command sets must be forgotten by the next.
    with flagsaver.flagsaver(), contextlib.redirect_stdout(printed):
        try:
            options = saved_model_cli.create_parser().parse_args([command, f"--dir={export_dir}", *arguments])
            options.func()
        # A malformed export fails in many ways, a parser with SystemExit.
        except (Exception, SystemExit) as error:
            raise ServingError(f"{export_dir}: saved_model_cli {command} fails: {error}") from error
    return printed.getvalue()
