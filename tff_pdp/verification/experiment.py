"""Checks all files in an experiment's folder, or in one run's folder; dependencies of a file are checked first."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SUCCESS_FILE
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.before_training import FORMAT_VERSION, RELEASES_FILE, read_releases
from tff_pdp.experiment.synthetic_data import DATA_FILE, KEY_FILE, check_data
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.record.forgotten import FORGOTTEN, manifest_digest, read_removals
from tff_pdp.training.record.releases import EARLIER, PERSONALIZE, Release, all_releases, is_unchained
from tff_pdp.verification.epsilons import Recomputed, check_statements, over_budget, recompute
from tff_pdp.verification.run_folder import Finding, Status, check_run, checked, config_of, is_run, journal_state

CLIENTS = "clients"


def verify(place: Path) -> Iterator[Finding]:
    """Checks digests, chains and epsilons in a folder, and whether the files belong together. Writes nothing.

    Raises:
      ConfigError: the folder is neither the output folder of an experiment, nor the folder of one of its runs.

    A report must be newer than the runs that it adds up:

    >>> from tff_pdp.training.evaluate import evaluate_experiment
    >>> summary = evaluate_experiment(config, ["mr_mtl"])
    >>> any(finding.status == Status.PROBLEM for finding in verify(Path(config.output)))
    False
    """
    if is_run(place):
        output, runs = place.parent, [place]
    else:
        output, runs = place, runs_of(place)
    yield from _check_record(output)
    for folder in runs:
        yield from check_run(folder)
    if not is_run(place):
        yield from _check_copies(runs)
    try:
        releases = all_releases(output)
    except DataError as error:
        yield Finding(output, Status.PROBLEM, f"the total spending is not known: {error}")
        recomputed = None
    else:
        recomputed = recompute(releases)
        yield from _check_epsilons(output, recomputed, only=place.name if is_run(place) else None)
    if not is_run(place):
        if (output / FORGOTTEN).exists():
            yield checked(output / FORGOTTEN, lambda: _removals(output))
        yield from _check_inputs(output, runs)
        yield from check_statements(output, recomputed)
        yield from _leftovers(output)


def runs_of(output: Path) -> list[Path]:
    """Lists the folders of an experiment's runs.

    Raises:
      ConfigError: the folder has no run.
    """
    found = sorted(path for path in output.glob("*") if not path.name.startswith(".") and is_run(path))
    if not found and not (output / EARLIER).exists():
        raise ConfigError(f"{output} holds no run: name the output folder of an experiment, or the folder of a method")
    return found


def _check_record(output: Path) -> Iterator[Finding]:
    """Checks the record of earlier releases."""
    path = output / EARLIER
    if is_unchained(path):
        yield Finding(path, Status.OLD, "lines of the first version, without a chain: counted as they are")
    elif path.exists():
        yield checked(path, lambda: journal_state(path))


def _check_copies(runs: Sequence[Path]) -> Iterator[Finding]:
    """Finds folders that hold one run twice."""
    first: dict[str, Path] = {}
    for folder in runs:
        # Damage is reported elsewhere.
        with contextlib.suppress(DataError):
            run_id = run_id_of(folder)
            if run_id and run_id in first:
                text = f"a copy of the run in {first[run_id]}: keep the one to be continued, and delete the other"
                yield Finding(folder, Status.PROBLEM, text)
            elif run_id:
                first[run_id] = folder


def _check_epsilons(output: Path, recomputed: Recomputed, *, only: str | None) -> Iterator[Finding]:
    """States the cost of each run, or of one alone, by its events, and of everything on record together."""
    for release, epsilons in zip(recomputed.releases, recomputed.own, strict=True):
        path = output / (EARLIER if release.run == PERSONALIZE else release.run)
        if only is not None and release.run != only:
            continue
        over = over_budget(release, epsilons)
        if over:
            yield Finding(path, Status.PROBLEM, f"{over[0]} has spent {epsilons[over[0]]:.6g}, more than its budget")
            continue
        yield Finding(path, Status.OK, f"{_words(release)}: {_spent(release, epsilons)}")
    releases = recomputed.releases
    if releases:
        why = recomputed.why_no_bound
        epsilon, delta = (max(values.values(), default=0.0) for values in (recomputed.composed, recomputed.deltas))
        text = f"no bound, as {why}" if why else f"epsilon at most {epsilon:.6g} at delta {delta:g}"
        yield Finding(
            output, Status.OK, f"everything on record in this folder together (runs and fits: {len(releases)}): {text}"
        )


def _words(release: Release) -> str:
    if release.run == PERSONALIZE:
        return "a fit of clients that were added"
    return f"{release.run}, rounds: {release.rounds}" + (f" (run {release.run_id[:8]})" if release.run_id else "")


def _spent(release: Release, epsilons: Mapping[str, float]) -> str:
    ledger = release.ledger
    if release.non_private or ledger is None:
        return f"no bound, as {release.non_private or 'there is no ledger'}"
    # The cost with the drawn number does not bound the cost with other numbers.
    chosen = [scope for scope in epsilons if ledger.follows_from_a_choice(scope)]
    values = sorted({**epsilons, **{scope: ledger.budgets[scope].epsilon for scope in chosen}}.values())
    bare = [value for value in values if math.isinf(value)]
    if bare:
        return f"no bound, as scopes are without noise, or without a budget: {len(bare)} of {len(epsilons)}"
    span = f"{values[0]:.6g}" if values[0] == values[-1] else f"{values[0]:.6g} to {values[-1]:.6g}"
    if chosen:
        return f"epsilon at most {span}: with noised numbers of examples, only budgets hold (scopes: {len(values)})"
    return f"epsilon {span}, computed anew from the events in the ledger, within the budgets (scopes: {len(values)})"


def _check_inputs(output: Path, runs: Sequence[Path]) -> Iterator[Finding]:
    """Checks the inputs of runs."""
    path = output / RELEASES_FILE
    if path.exists() or any(_releases_statistics(config_of(folder)) for folder in runs):
        yield checked(path, lambda: _statistics(path))
    # A damaged file of releases has been reported.
    with contextlib.suppress(DataError):
        sha256 = read_releases(path).get("synthetic_sha256") if path.exists() else None
        if sha256 is not None:
            yield checked(output / DATA_FILE, lambda: _synthetic_data(output, sha256))
    clients = output / CLIENTS
    if clients.exists():
        yield checked(clients, lambda: _dataset(clients))
    else:
        yield Finding(clients, Status.ABSENT, "the client dataset is not here, so it was not checked")


def _removals(output: Path) -> tuple[Status, str]:
    """Checks the record of removed clients, and that the dataset is the one that the newest removal left."""
    status, text = journal_state(output / FORGOTTEN)
    removals = read_removals(output)
    if stopped := sum(one.after is None for one in removals):
        return Status.STOPPED, f"{text}; removals of clients that were stopped, to be completed by forget: {stopped}"
    present = manifest_digest(output)
    follows = (
        "the present dataset follows from them"
        if removals and removals[-1].after == present
        else ("the dataset was prepared anew since" if present else "there is no dataset")
    )
    return status, f"{text}; clients removed: {len(removals)}; {follows}"


def _releases_statistics(config: Mapping[str, Any]) -> bool:
    """Checks if silos of a run have released statistics or synthetic data before training, which are charged once."""
    privacy = config.get("privacy", {})
    kinds = [(privacy.get(name) or {}).get("kind") for name in ("num_examples", "feature_scaling")]
    return "noised" in kinds or "dp_moments" in kinds or privacy.get("synthetic") is not None


def _statistics(path: Path) -> tuple[Status, str]:
    content = read_releases(path)
    text = f"statistics of {len(content['silos'])} silos"
    if f'"format_version": {FORMAT_VERSION}'.encode() not in path.read_bytes():
        return Status.OLD, f"{text}, without a digest"
    return Status.OK, f"{text}; the digest agrees"


def _synthetic_data(output: Path, sha256: str) -> str:
    check_data(output, sha256)
    return f"silos' synthetic data, with the SHA-256 that {RELEASES_FILE} states"


def _dataset(clients: Path) -> tuple[Status, str]:
    dataset = ClientDataset.open(clients, verify=True)
    text = f"{len(dataset.client_ids)} clients, {len(dataset.manifest.shards)} shards, as the manifest says"
    if not (clients / SUCCESS_FILE).stat().st_size:
        return Status.OLD, f"{text}; the manifest itself has no digest"
    return Status.OK, f"{text}, and the manifest as {SUCCESS_FILE} says"


def _leftovers(output: Path) -> Iterator[Finding]:
    """Lists what killed commands left of replaced runs: the runs are on record, but keys and states are still there."""
    for path in sorted(output.glob(".*.removed")):
        yield Finding(path, Status.STOPPED, "left of a replaced run, with its key; the next `tff-pdp train` removes it")
    path = output / KEY_FILE
    if path.exists():
        text = "the key of a release before training that was stopped; the next command that trains removes it"
        yield Finding(path, Status.STOPPED, text)
