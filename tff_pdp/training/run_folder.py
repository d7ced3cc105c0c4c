"""Files in a run's folder beside its checkpoints: how it was configured and computed, and its validation metrics."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.files import discard, naming, sync, write_atomically
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.digests import read_json, write_json
from tff_pdp.training.record.releases import CHECKPOINTS, check_files

# How the clients of each computation are computed, where the engine has chosen.
CHOICES_FILE = "client_parallelism.json"
CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"
# Settings that decide how sums are rounded.
_DECISIVE = ("engine", "device", "client_parallelism", "clients_per_call")


def start_folder(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Makes a run's folder, with the resolved experiment and without metrics.

    What is left of a run that was stopped before its first checkpoint goes.

    Raises:
      DataError: the folder holds charges of a run whose checkpoints are gone.
    """
    charges = read_charges(folder)
    if charges is not None and charges.through_round:
        raise DataError(
            f"{folder} holds a record of {charges.through_round} rounds, and no checkpoint of them: restore it from a "
            "copy, or give --overwrite to start again"
        )
    discard(folder)
    folder.mkdir(parents=True)
    write_atomically(folder / CONFIG_FILE, [json.dumps(_resolved(config, device), indent=2).encode()])
    write_atomically(folder / METRICS_FILE, [])
    sync(folder.parent)


def check_engine(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Refuses to repeat rounds with other rounding: their noise, which is the same, would not hide the difference.

    Raises:
      ConfigError: the run was started in another way.
      DataError: what it was started with is missing or damaged.
    """
    started_with = _started_with(folder, *_DECISIVE)
    content = _resolved(config, device)["training"]
    for key in _DECISIVE:
        if started_with[key] != content[key]:
            raise ConfigError(
                f"{folder} was started with training.{key} {started_with[key]!r}, not {content[key]!r}: resume it in "
                "the same way, or give --overwrite to start again"
            )


def checkpoints_were_every(folder: Path) -> int:
    """After how many rounds a run that was started wrote a checkpoint each time.

    Raises:
      DataError: what it was started with is missing or damaged.
    """
    return max(1, int(_started_with(folder, "checkpoint_every")["checkpoint_every"]))


def _started_with(folder: Path, *keys: str) -> dict[str, Any]:
    """Some settings of the section `training` that a run was started with."""
    path = folder / CONFIG_FILE
    try:
        training = json.loads(path.read_bytes())["training"]
        return {key: training[key] for key in keys}
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): restore it from a copy") from None


def append_metrics(folder: Path, round_number: int, metrics: Mapping[str, Any]) -> None:
    """Adds a row of validation metrics; when this returns, the row outlasts a power cut."""
    path = folder / METRICS_FILE
    with naming(path), open(path, "a") as file:
        file.write(json.dumps({"round": round_number, "split": "validation", **metrics}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the validation metrics a run has written: one row for each evaluated round.

    Raises:
      DataError: the file is missing or damaged.
    """
    path = folder / METRICS_FILE
    saved = checkpoint_files.newest(folder / CHECKPOINTS, with_arrays=False)
    if saved is not None:
        check_files(folder, saved)
    try:
        # A process that was killed while writing leaves a last line without its end.
        lines = path.read_bytes().split(b"\n")[:-1]
        rows = [json.loads(line) for line in lines]
        if not all(isinstance(row["round"], int) for row in rows):
            raise ValueError("a row without its round")
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): restore it from a copy") from None
    return rows


def cut_metrics(folder: Path, round_number: int) -> None:
    """Takes away the rows of later rounds, and a torn one.

    Raises:
      DataError: the file is missing or damaged.
    """
    rows = [row for row in read_metrics(folder) if row["round"] <= round_number]
    write_atomically(folder / METRICS_FILE, ["".join(json.dumps(row) + "\n" for row in rows).encode()])


class Choices(dict[str, str]):
    """How the clients of each computation are computed, where the engine has chosen: by its fingerprint.

    Other ways to compute round differently. So a choice is on disk before its first result is used, and a run that is
    resumed goes on with it.
    """

    _folder: Path | None = None

    def keep_in(self, folder: Path) -> None:
        """Writes what has been chosen, and from now on each further choice, to a run's folder."""
        self._folder = folder
        self._write()

    def __setitem__(self, computation: str, mode: str) -> None:
        super().__setitem__(computation, mode)
        self._write()

    def _write(self) -> None:
        if self._folder is not None and self:
            write_json(self._folder / CHOICES_FILE, {"format_version": 1, "choices": dict(self)})


def read_choices(folder: Path) -> dict[str, str]:
    """Reads what a run's `Choices` are.

    Raises:
      DataError: the file is damaged.
    """
    path = folder / CHOICES_FILE
    if not path.exists():
        return {}
    content = read_json(path, undigested=(None,))
    # The first version had the choices alone.
    return content["choices"] if "format_version" in content else content


def _resolved(config: ExperimentConfig, device: str) -> dict[str, Any]:
    """The experiment as plain data, with the device that it runs on in place of the one asked for."""
    content = config.to_dict()
    content["training"]["device"] = device
    return content
