"""Removes a client from an experiment's folder, and states what remains of the client.

The steps can be repeated: a command that was killed is completed by the same command. First the export gets a version
without the client, because this step may fail; then runs are sealed, the dataset is written anew, and results are
removed. `tff_pdp.training.record.forgotten` has the record of removals.

The states of a run are those of the clients of one dataset. A run whose dataset has lost a client could be continued
or tested only with other plans and other shapes than it was trained with, so its states are destroyed as a whole.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from beam_pipelines.dataset.without_client import remove_client, remove_letters
from serving.client_ids import ClientIdHash
from serving.saved_model import layout
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError, DataError, ServingError
from tff_pdp.experiment.config import RELEASES_FILE, ExperimentConfig
from tff_pdp.files import discard, remove_tree
from tff_pdp.lock import only_writer
from tff_pdp.personal_models.model_card import newest_version
from tff_pdp.personal_models.new_clients.examples import DEAD_LETTERS
from tff_pdp.personal_models.new_clients.version import adding_to_export, publish_without
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import upper
from tff_pdp.training.evaluate import write_summary
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.forgotten import FORGOTTEN_KEY, begin_removal, end_removal, read_removals
from tff_pdp.training.record.releases import Release, all_releases
from tff_pdp.training.record.sealing import check_can_be_sealed, seal_run
from tff_pdp.training.run_folder import SELECTED_FILE, read_selected, remove_far_states, write_selected
from tff_pdp.verification.epsilons import EXPORT_FOLDER, SUMMARY_FILE, check_models_are_used, recompute
from tff_pdp.verification.experiment import runs_of
from tff_pdp.verification.run_folder import planned_rounds

REPORT_FILE = "report.html"
# Files that a kind of raw data has made for itself; `tff-pdp prepare` makes them again.
_WORKSPACE = "raw"
_NOTE = "Figures were computed while a client that was removed since was among the clients."


class Remaining(NamedTuple):
    """The trace of a removed client in models that are in use.

    Attributes:
      scope: words for what epsilon is about: one record of the client, or the client as a whole.
      epsilon: epsilon of everything on record together; infinite if no bound holds.
      delta: delta of `epsilon`.
      why_no_bound: reason why no epsilon holds; empty if one holds.
    """

    scope: str
    epsilon: float
    delta: float
    why_no_bound: str


class Forgotten(NamedTuple):
    """The result of a removal.

    Attributes:
      client_id: id of the removed client.
      removed: what was removed, one line each.
      remaining: what remains in models.
      stays: what else remains, one line each.
    """

    client_id: str
    removed: list[str]
    remaining: Remaining
    stays: list[str]

    def text(self) -> str:
        """Returns the result as text for people."""
        return "\n".join(
            [
                *(f"removed: {line}" for line in self.removed),
                f"remains: {_words(self.remaining)}",
                *(f"remains: {line}" for line in self.stays),
            ]
        )

    def content(self) -> dict[str, Any]:
        """Returns the result as plain data for JSON."""
        remaining = {**self.remaining._asdict(), "text": _words(self.remaining)}
        return json_safe({**self._asdict(), "remaining": remaining})


def forget(
    config: ExperimentConfig, client_id: str, *, unfinished: bool = False, discard_models: bool = False
) -> Forgotten:
    """Removes a client from an experiment: records, dead letters, states, the row in the export, and results.

    Guarantee: when this function returns, the experiment's folder has no example and no state of the client, and no
      export of the folder has the client's row; spending on record is unchanged.
    Assumes: as in `tff_pdp.training.record.sealing.seal_run`. Models of other clients, and the shared model, were
      trained with the client's records; the returned epsilon and delta bound what they reveal of these.

    Args:
      config: the experiment.
      client_id: id of the client.
      unfinished: whether to go on although runs have not ended; such runs can never be finished.
      discard_models: whether to go on although models of ended runs were not evaluated or exported.

    Raises:
      ConfigError: the experiment has no such client, or a run is unfinished or its models were not used; nothing was
        changed.
      DataError, ServingError: a file is damaged, another process is at work, or the export cannot be written. Call the
        function again to complete the removal.
    """
    output = Path(config.output)
    if not output.is_dir():
        raise ConfigError(f"{output} does not exist: the experiment has nothing of a client yet")
    with only_writer(output / "forgotten"):
        hashed = ClientIdHash.load_or_create(output / FORGOTTEN_KEY)(client_id)
        _check_known(config, client_id, hashed)
        runs = _runs(output)
        for folder in runs:
            is_finished = check_can_be_sealed(folder, planned_rounds(folder), is_unfinished_too=unfinished)
            if is_finished and not discard_models:
                check_models_are_used(folder)
        removal = begin_removal(output, hashed)
        releases = all_releases(output)
        remaining = _remaining(releases, client_id)
        removed = list(_from_exports(config, client_id, remaining))
        for folder in runs:
            remove_far_states(folder)
            sealed = seal_run(folder, planned_rounds(folder), is_unfinished_too=unfinished)
            if sealed.num_files:
                removed.append(f"{folder}: key and states of all its clients, as in tff-pdp seal ({sealed.num_files})")
        removed += _from_dataset(config, client_id)
        removed += _from_results(output, runs, client_id)
        end_removal(output, removal)
    return Forgotten(client_id, removed, remaining, _what_stays(config, client_id, releases))


def _check_known(config: ExperimentConfig, client_id: str, hashed: str) -> None:
    """Checks that something of a client is in an experiment's folder, or that its removal was stopped."""
    output = Path(config.output)
    removals = [one for one in read_removals(output) if one.client == hashed]
    if any(one.after is None for one in removals):
        return
    known = config.clients_folder.is_dir() and client_id in ClientDataset.open(config.clients_folder).client_ids
    if not known and not any(_holders(config, client_id)):
        was = "was removed already" if removals else "is neither in the client dataset nor in an export"
        raise ConfigError(f"{output}: client {client_id!r} {was}")


def _runs(output: Path) -> list[Path]:
    with contextlib.suppress(ConfigError):
        return runs_of(output)
    return []


def _served_ids(config: ExperimentConfig, client_id: str) -> set[str]:
    """Returns the ids that a client may have in exports: its own, and its hash."""
    if not config.client_id_key.exists():
        return {client_id}
    return {client_id, ClientIdHash.load(config.client_id_key)(client_id)}


def _holders(config: ExperimentConfig, client_id: str) -> Iterator[tuple[Path, list[Path]]]:
    """Yields folders of models in the experiment's exports, each with the versions that have a client."""
    own = _served_ids(config, client_id)
    for base_path in sorted((Path(config.output) / EXPORT_FOLDER).glob("*")):
        if not layout.is_plain_directory(base_path):
            continue
        versions = layout.published_versions(base_path).values()
        found = [version for version in versions if own & set(_exported_clients(version))]
        if found:
            yield base_path, found


def _exported_clients(version: Path) -> list[str]:
    try:
        return (version / layout.VOCABULARY_FILE).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"{version / layout.VOCABULARY_FILE} cannot be read ({error}): remove {version}") from None


def _from_exports(config: ExperimentConfig, client_id: str, remaining: Remaining) -> Iterator[str]:
    """Publishes the export without the client, and deletes all versions with the client; yields what was done."""
    export = Path(config.output) / EXPORT_FOLDER
    for base_path, versions in list(_holders(config, client_id)):
        if any(base_path.name == f"{config.export.model_name}.{one}" for one in _served_ids(config, client_id)):
            discard(base_path)
            yield f"{base_path}: the client's own export"
            continue
        if base_path.resolve() == config.export_folder and newest_version(base_path) == versions[-1]:
            with adding_to_export(config) as exported:
                version = publish_without(config, exported, exported.served_id(client_id), _words(remaining))
            yield f"{version}: the next version, without the client's row; older versions follow"
        for version in versions:
            discard(version)
            yield f"{version}: a version with the client's row"
    # Leftovers of an earlier command that was killed.
    for leftover in export.glob("**/.*.removed"):
        remove_tree(leftover, ignore_errors=True)


def _from_dataset(config: ExperimentConfig, client_id: str) -> Iterator[str]:
    """Removes the client's examples and dead letters, and copies of raw data; yields what was done."""
    clients, output = config.clients_folder, Path(config.output)
    if clients.exists():
        before = ClientDataset.open(clients).manifest
        after = remove_client(clients, client_id)
        lost = before.kept.examples - after.kept.examples
        if lost:
            yield f"{clients}: {lost} examples of the client"
    for folder in (clients.with_name(f"{clients.name}.dead_letters"), output / DEAD_LETTERS):
        if count := remove_letters(folder, client_id):
            yield f"{folder}: {count} dead letters"
    if (output / _WORKSPACE).exists():
        discard(output / _WORKSPACE)
        yield f"{output / _WORKSPACE}: raw data that `tff-pdp prepare` had made for itself"


def _from_results(output: Path, runs: list[Path], client_id: str) -> Iterator[str]:
    """Removes the client's results and hyper-parameters; yields what was done."""
    for folder in runs:
        if (folder / SELECTED_FILE).exists():
            selected = read_selected(folder)
            if client_id in selected:
                write_selected(folder, {one: own for one, own in selected.items() if one != client_id})
                yield f"{folder / SELECTED_FILE}: the client's hyper-parameters"
    path = output / SUMMARY_FILE
    if path.exists():
        summary = _without_results(path, client_id)
        if summary is not None:
            write_summary(output, summary)
            yield f"{path}: the client's results"
    if (output / REPORT_FILE).exists():
        (output / REPORT_FILE).unlink()
        yield f"{output / REPORT_FILE}: the whole report, which has every client's results"


def _without_results(path: Path, client_id: str) -> dict[str, Any] | None:
    """Returns a summary without a client's results; None if it has none."""
    try:
        summary = json.loads(path.read_bytes())
        rows = {key: summary[key] for key in ("silos", "users") if summary.get(key)}
        kept = {key: [row for row in own if row["id"] != client_id] for key, own in rows.items()}
        if kept == rows:
            return None
        return {**summary, **kept, "notes": [*(note for note in summary["notes"] if note != _NOTE), _NOTE]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): remove the file") from None


def _remaining(releases: list[Release], client_id: str) -> Remaining:
    """Returns what all runs and fits on record together may reveal of a client."""
    ledgers = [release.ledger for release in releases if release.ledger is not None]
    own = [ledger for ledger in ledgers if client_id in ledger.budgets or ledger.unit == "user"]
    scope = "the client as a whole" if any(one.unit == "user" for one in own) else f"one {_unit(own)} of the client"
    if not releases:
        return Remaining(scope, 0.0, 0.0, "")
    recomputed = recompute(releases)
    if recomputed.why_no_bound or not own:
        return Remaining(scope, math.inf, 0.0, recomputed.why_no_bound or "no ledger is about the client")
    key = client_id if client_id in recomputed.composed else next(iter(own[0].budgets))
    return Remaining(scope, recomputed.composed[key], recomputed.deltas[key], "")


def _unit(ledgers: list[Any]) -> str:
    units = {"silo_example": "record", "node": "person", "edge": "pair of people"}
    return units.get(str(ledgers[0].unit), "record") if ledgers else "record"


def _words(remaining: Remaining) -> str:
    """States what models reveal of a removed client, as a sentence."""
    if remaining.epsilon == 0:
        return "nothing in models: no run is on record"
    models = "the shared model and the models of other clients were trained with the removed client's records"
    if remaining.why_no_bound or math.isinf(remaining.epsilon):
        why = remaining.why_no_bound or "the client had no finite budget"
        return f"{models}, and may reveal them: no epsilon holds ({why})"
    return (
        f"{models}; for {remaining.scope}, everything on record together is differentially private with epsilon "
        f"{upper(remaining.epsilon)} at delta {remaining.delta:g}"
    )


def _what_stays(config: ExperimentConfig, client_id: str, releases: list[Release]) -> list[str]:
    """Lists what else remains of a removed client, and how to remove it."""
    output = Path(config.output)
    stays = []
    if any(release.ledger and client_id in release.ledger.budgets for release in releases):
        stays.append(
            "the record of spending (charges.jsonl, earlier_releases.jsonl, the registry) with the client's id and "
            "epsilon, without which costs of later releases could not be computed"
        )
    if any(read_charges(folder) is not None for folder in _runs(output)):
        stays.append("keyed digests of the client's examples in the registry, for the cost of later runs")
    if (output / RELEASES_FILE).exists():
        stays.append(
            f"{output / RELEASES_FILE}, and synthetic data: values that the client has released with noise, whose cost "
            "is in epsilon"
        )
    stays.append(
        f"raw data at {config.data.input}: remove the client there, too, before the data are prepared anew with "
        "--overwrite"
    )
    stays.append("copies: backups, snapshots, servers and kits with older versions of the export")
    return stays
