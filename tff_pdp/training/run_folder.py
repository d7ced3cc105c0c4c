"""Writes and reads files beside a run's checkpoints: configuration, validation metrics, selected hyper-parameters."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tff_pdp.digests import as_line, from_text, read_json, write_json
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import RELEASES_FILE, ExperimentConfig, decisive_settings
from tff_pdp.files import discard, naming, remove_attempts, sync, write_atomically
from tff_pdp.settings import join_key
from tff_pdp.trackers.base import NONPRIVATE
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import CHECKPOINTS, SEARCH, STORE, check_files

CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"
# Every silo's selection in a search: hyper-parameters and their noisy score.
SELECTED_FILE = "selected.json"
FORMAT_VERSION = 1
# Files whose beginnings checkpoints know, by path from the run's folder.
_RELEASES = f"../{RELEASES_FILE}"
FILES_BESIDE = (CONFIG_FILE, METRICS_FILE, _RELEASES)
# Folders that a run goes on from.
_RESUMED = (CHECKPOINTS, SEARCH)
# Settings that may change when a run goes on after its last round.
EXTENDED = ("training.rounds", "privacy.budgets")
# Settings that decide how sums are rounded.
_DECISIVE = ("engine", "device", "client_parallelism", "clients_per_call", "xla")


def start_folder(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Makes a run's folder with the resolved experiment and no metrics; replaces a run that has made no round.

    Raises:
      DataError: the folder has a record of rounds, but no checkpoint.
    """
    charges = read_charges(folder)
    if charges is not None and charges.through_round:
        raise DataError(
            f"{folder} holds a record of {charges.through_round} rounds, but no checkpoint: restore the folder from a "
            "copy, or give --overwrite to start again"
        )
    discard(folder)
    folder.mkdir(parents=True)
    content = {"format_version": FORMAT_VERSION, **_resolved(config, device)}
    outside = {section: origin for name in config.algorithms for section, origin in config.outside(name).items()}
    write_json(folder / CONFIG_FILE, {**content, "outside": outside} if outside else content)
    write_atomically(folder / METRICS_FILE, [])
    sync(folder.parent)


def sweep(folder: Path) -> None:
    """Removes temporary files that killed commands left in a run's folder; to be called only by the folder's writer."""
    remove_attempts(folder)
    for part in _RESUMED:
        checkpoint_files.sweep(folder / part)


def remove_far_states(folder: Path) -> None:
    """Removes clients' states that workers keep at a URL."""
    if (folder / STORE / "states.json").exists():
        # Imports TensorFlow, which other runs need not wait for.
        from tff_pdp.training.client_store.state_files import remove_far_files

        remove_far_files(folder / STORE)


def check_engine(config: ExperimentConfig, folder: Path, device: str) -> None:
    """Checks that a run is resumed with the engine, device, parallelism and use of XLA that it was started with.

    Otherwise, repeated rounds would add the same noise to differently rounded sums, which would reveal data.

    Raises:
      ConfigError: the run was started with another engine, device, parallelism or use of XLA.
      DataError: the run's configuration file is missing or damaged.
    """
    started_with = _started_with(folder, *_DECISIVE)
    content = _resolved(config, device)["training"]
    for key in _DECISIVE:
        if started_with[key] != content[key]:
            raise ConfigError(
                f"{folder} was started with training.{key} {started_with[key]!r}, not {content[key]!r}: resume it "
                "with the old value, or give --overwrite to start again"
            )


def check_beside(folder: Path, *, is_replaced: bool) -> None:
    """Checks the files that a command continues from, before the command uses the files.

    Files beside the newest checkpoint are checked unless the run is to be replaced (`is_replaced`). The file of silos'
    releases before training is checked in any case: without that file, silos would release their statistics a second
    time.

    Raises:
      ConfigError: the folder is a link.
      DataError: a file, or the run's checkpoint, is missing or damaged.
    """
    if folder.is_symlink():
        # A new run replaces its folder, which behind a link may belong to another experiment. Checkpoints of a resumed
        # run know the files beside the folder, and a link has other files beside it.
        raise ConfigError(
            f"{folder} is a link to {folder.resolve()}: a run cannot be started, continued or replaced through a link. "
            "Name the real folder as output, or remove the link"
        )
    for saved in () if is_replaced else checkpoint_files.newest_of(folder, _RESUMED):
        check_files(folder, saved)
    output = folder.parent
    for path in sorted({path.parent for part in _RESUMED for path in output.glob(f"*/{part}/round_*")}):
        saved = None
        # Commands that need a damaged run report the damage.
        with contextlib.suppress(DataError):
            saved = None if path.parent == folder else checkpoint_files.newest(path, with_arrays=False)
        known = saved.surroundings.files if saved is not None and saved.surroundings is not None else {}
        if _RELEASES in known:
            known[_RELEASES].check(output / RELEASES_FILE)


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Reads the resolved experiment of a run: that which it was started with, and what extensions have changed.

    Raises:
      DataError: the run's configuration file, or its record, is missing or damaged.
    """
    content, charges = read_started_with(folder), read_charges(folder)
    for extension in charges.extensions if charges else ():
        for key, value in extension.settings.items():
            section, _, last = key.rpartition(".")
            content[section] = {**content[section], last: value}
    return content


def other_settings(config: ExperimentConfig, name: str, folder: Path, done: str) -> str:
    """Returns the error message for a run that was started with other settings, or other data, than `config` has.

    The message names the first setting that differs, with both values, and says how to go on. `name` is the method,
    and `done` has words for the part of the run that is paid for and that starting again would throw away.

    Raises:
      DataError: the run's configuration file is missing or damaged.
    """
    then, now = (_decisive(content, name) for content in (settings_of_run(folder), config.to_dict()))
    differing = [key for key in sorted({*then, *now}) if then.get(key, _NOT_SET) != now.get(key, _NOT_SET)]
    again = (
        f"to start again, name another `output`; --overwrite throws {done} away, but not the cost, "
        "which stays on record"
    )
    if not differing:
        return (
            f"{folder} was trained with the same settings, but with other data: {config.clients_folder}, or a file or "
            f"module that the settings name, has changed since. Restore the data to go on; {again}"
        )
    key, more = differing[0], differing[1:]
    others = f" ({', '.join(more)} differ{'s' if len(more) == 1 else ''}, too)" if more else ""
    return (
        f"{folder} was trained with other settings: {key} was {_shown(then, key)}, and is {_shown(now, key)} "
        f"now{others}. Restore the old value to go on; {again}"
    )


# Stands for the value of a key that an experiment does not have.
_NOT_SET = object()


def _decisive(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the settings that decide a run, by dotted key; empty if the experiment does not have the method."""
    if name not in content.get("algorithms", {}):
        return {}
    try:
        sections = decisive_settings(content, name)
    except (KeyError, TypeError):
        # An experiment of an earlier version has other keys.
        return {}
    sections["algorithms"], sections["tuning.search"] = sections.pop("algorithm"), sections.pop("search", {})
    return dict(_leaves(sections, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings, by dotted key."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, member in value.items():
        yield from _leaves(member, join_key(key, name))


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "not set"


def read_started_with(folder: Path) -> dict[str, Any]:
    """Reads the resolved experiment that a run was started with; files of format version 1 may lack a digest.

    Raises:
      DataError: the file is missing, damaged, or of another format version.
    """
    content = read_json(folder / CONFIG_FILE, undigested=(None,))
    if content.pop("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise DataError(f"{folder / CONFIG_FILE} has another format version than {FORMAT_VERSION}, the only one read")
    return content


def checkpoints_were_every(folder: Path) -> int:
    """Returns the setting `checkpoint_every` that a run was started with.

    Raises:
      DataError: the run's configuration file is missing or damaged.
    """
    return max(1, int(_started_with(folder, "checkpoint_every")["checkpoint_every"]))


def _started_with(folder: Path, *keys: str) -> dict[str, Any]:
    try:
        training = read_started_with(folder)["training"]
        # Runs of earlier versions had no XLA, and no setting for XLA.
        return {key: {"xla": "never", **training}[key] for key in keys}
    except (KeyError, TypeError) as error:
        path = folder / CONFIG_FILE
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): restore it from a copy") from None


def append_metrics(folder: Path, round_number: int, metrics: Mapping[str, Any]) -> None:
    """Adds a row of validation metrics; the row outlasts a power cut once the function has returned."""
    path = folder / METRICS_FILE
    with naming(path), open(path, "a") as file:
        row = {"format_version": FORMAT_VERSION, "round": round_number, "split": "validation", **metrics}
        file.write(as_line(row))
        file.flush()
        os.fsync(file.fileno())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the validation metrics that a run has written: one row for each evaluated round.

    Raises:
      DataError: the file is missing or damaged.
    """
    path = folder / METRICS_FILE
    for saved in checkpoint_files.newest_of(folder, (CHECKPOINTS,)):
        check_files(folder, saved)
    try:
        # A process that was killed while writing leaves a last line without its end.
        lines = path.read_bytes().split(b"\n")[:-1]
        rows = [from_text(line, undigested=(None,)) for line in lines]
        if not all(isinstance(row["round"], int) for row in rows):
            raise ValueError("a row without its round")
        if any(row.get("format_version", FORMAT_VERSION) != FORMAT_VERSION for row in rows):
            raise ValueError(f"a row of another format version than {FORMAT_VERSION}")
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): restore it from a copy") from None
    return rows


def validation_means(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Returns pairs (round, mean of the validation metric over clients) of rows of `read_metrics`.

    Rows without validation figures (`training.nonprivate_metrics: false`) are left out. In rows of earlier versions,
    the mean is beside the round.
    """
    pairs = ((row["round"], row.get(NONPRIVATE, row).get("mean")) for row in rows)
    return [(number, float(mean)) for number, mean in pairs if mean is not None]


def cut_metrics(folder: Path, round_number: int) -> None:
    """Removes the rows of rounds after `round_number`, and an incomplete last row.

    Raises:
      DataError: the file is missing or damaged.
    """
    rows = [row for row in read_metrics(folder) if row["round"] <= round_number]
    # Each line as it was written: checkpoints keep digests of the beginning of the file.
    lines = [as_line(row) if "format_version" in row else json.dumps(row) + "\n" for row in rows]
    write_atomically(folder / METRICS_FILE, ["".join(lines).encode()])


def write_selected(folder: Path, selected: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the hyper-parameters that each silo selected in a search; keys are client ids."""
    write_json(folder / SELECTED_FILE, {"format_version": FORMAT_VERSION, "selected": selected})


def read_selected(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the hyper-parameters that `write_selected` wrote; files of format version 1 may lack a digest.

    Raises:
      DataError: the file is missing, damaged, or of another format version.
    """
    content = read_json(folder / SELECTED_FILE, undigested=(None,))
    # The first version had the selection alone.
    if "format_version" not in content:
        return content
    if content["format_version"] != FORMAT_VERSION:
        raise DataError(f"{folder / SELECTED_FILE} has another format version than {FORMAT_VERSION}, the only one read")
    return content["selected"]


def _resolved(config: ExperimentConfig, device: str) -> dict[str, Any]:
    """Returns the experiment as plain data, with the run's device and use of XLA, which may be those of `auto`."""
    content = config.to_dict()
    on_device = "never" if device == "cpu" else "always"
    content["training"] |= {"device": device, "xla": on_device if config.xla == "auto" else config.xla}
    return content
