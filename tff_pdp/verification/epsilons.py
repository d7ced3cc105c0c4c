"""Recomputes epsilons from the events of the ledgers on record, and compares reports and exports with the results."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving.client_ids import ClientIdHash
from serving.saved_model import layout
from tff_pdp.errors import ConfigError, DataError, ServingError
from tff_pdp.privacy.accounting.kept import worked_out_anew
from tff_pdp.privacy.accounting.ledger import Ledger, compose_parts
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.releases import Release, why_without_bound
from tff_pdp.training.run_folder import read_started_with
from tff_pdp.verification.run_folder import Finding, Status, checked

SUMMARY_FILE = "summary.json"
EXPORT_FOLDER = "export"
CLIENT_ID_KEY = "client_id.key"


class Recomputed(NamedTuple):
    """Recomputed epsilons of releases, each at the delta of the release's budget; infinite if no bound holds.

    Attributes:
      releases: the releases on record.
      own: for each release, its epsilon by scope (a silo, or all users); empty for a release without a ledger.
      composed: epsilon of all releases together, by scope, at the scope's delta in `deltas`.
      deltas: delta by scope, as in `compose_parts`: the sum of the deltas of releases that cost their whole budgets,
        plus the largest delta of the scope's other releases.
      why_no_bound: reason why no epsilon holds for all releases together; empty if one holds.
    """

    releases: Sequence[Release]
    own: Sequence[Mapping[str, float]]
    composed: Mapping[str, float]
    deltas: Mapping[str, float]
    why_no_bound: str

    def of(self, run_id: str | None, name: str) -> int | None:
        """Returns the position of the newest release with a run id or, without an id, with a name; None if missing."""
        places = [
            place
            for place, release in enumerate(self.releases)
            if (release.run_id == run_id if run_id else release.run == name)
        ]
        return places[-1] if places else None


@worked_out_anew()
def recompute(releases: Sequence[Release]) -> Recomputed:
    """Recomputes the epsilons of releases with dp-accounting, from the releases' events alone; uses no cached results.

    Guarantee: as in `tff_pdp.privacy.accounting.ledger.compose_parts`.
    Assumes: as in `compose_parts`, and that the releases are about the same records.
    """
    known: dict[Any, Any] = {}
    why = why_without_bound(releases)
    ledgers = [release.ledger for release in releases if release.ledger is not None]
    own = [
        {}
        if release.ledger is None
        else {
            scope: math.inf if release.non_private else _spent(release.ledger, scope, known)
            for scope in release.ledger.budgets
        }
        for release in releases
    ]
    scopes = list(dict.fromkeys(scope for ledger in ledgers for scope in ledger.budgets))
    together = {scope: (math.inf, 0.0) if why else _together(ledgers, scope, known) for scope in scopes}
    composed = {scope: epsilon for scope, (epsilon, _) in together.items()}
    if not why and math.inf in composed.values():
        why = "a run on record has scopes without noise, or without a budget"
    return Recomputed(releases, own, composed, {scope: delta for scope, (_, delta) in together.items()}, why)


def over_budget(release: Release, epsilons: Mapping[str, float]) -> list[str]:
    """Lists the scopes (silos, or all users) that exceed their budgets in a release, given each scope's epsilon."""
    if release.ledger is None or release.non_private:
        return []
    budgets = release.ledger.budgets
    return [scope for scope, epsilon in epsilons.items() if not is_at_most(epsilon, budgets[scope].epsilon)]


def is_at_most(value: float, bound: float) -> bool:
    """Checks if `value <= bound`, up to rounding differences between versions of NumPy and SciPy."""
    return value <= bound or math.isclose(value, bound, rel_tol=1e-6)


def _spent(ledger: Ledger, scope: str, known: dict[Any, Any]) -> float:
    """Adds up a ledger's events, computed once for scopes that have released the same."""
    key = ("events", _key(ledger, scope))
    if key not in known:
        known[key] = ledger.epsilon(scope).best
    return known[key]


def _together(ledgers: Sequence[Ledger], scope: str, known: dict[Any, Any]) -> tuple[float, float]:
    """Returns epsilon and delta as `compose_parts` does, computed once for scopes that have released the same."""
    parts = [ledger for ledger in ledgers if scope in ledger.budgets]
    key = tuple(_key(ledger, scope) for ledger in parts)
    if key not in known:
        bounds, delta = compose_parts([(ledger, scope) for ledger in parts])
        known[key] = bounds.best, delta
    return known[key]


def _key(ledger: Ledger, scope: str) -> Any:
    entries = tuple((entry.event, entry.count) for entry in ledger.entries if entry.scope == scope)
    return entries, ledger.budgets[scope], ledger.unit, ledger.adjacency


def check_statements(output: Path, recomputed: Recomputed | None) -> Iterator[Finding]:
    """Checks `summary.json` and every published export in an experiment's folder.

    If `recomputed` is None because the record is unreadable, the files are read but no epsilon is compared.
    """
    path = output / SUMMARY_FILE
    if path.exists():
        yield checked(path, lambda: _summary(output, path, recomputed))
    key = output / CLIENT_ID_KEY
    if key.exists():
        yield checked(key, lambda: _client_id_key(output, key))
    for version in export_versions(output):
        yield checked(version, lambda version=version: _export(output, version, recomputed))


def export_versions(output: Path) -> Iterator[Path]:
    """Yields the folder of each published model version among an experiment's exports."""
    base_paths = sorted(path for path in (output / EXPORT_FOLDER).glob("*") if layout.is_plain_directory(path))
    for base_path in base_paths:
        yield from layout.published_versions(base_path).values()


def check_models_are_used(folder: Path) -> None:
    """Checks that the models of a finished run were evaluated and, if its experiment exports them, exported.

    Raises:
      ConfigError: an evaluation or export is missing, and would be impossible once key and states are destroyed.
      DataError: the settings that the run was started with are missing or damaged.
    """
    charges, output, name = read_charges(folder), folder.parent, folder.name
    if charges is not None and charges.is_sealed:
        return
    run_id = None if charges is None else charges.run_id
    path = output / SUMMARY_FILE
    rows = read_json(path).get("algorithms", {}) if path.exists() else {}
    or_else = "first, or give --discard-models: a sealed run can be neither evaluated nor exported"
    if name not in rows or rows[name].get("run", run_id) != run_id:
        raise ConfigError(f"{path} has no results of {folder}: run `tff-pdp evaluate` {or_else}")
    if read_started_with(folder).get("export", {}).get("algorithm") != name:
        return
    cards = (read_json(version / layout.MODEL_CARD_FILE) for version in export_versions(output))
    if not any(card.get("algorithm") == name and card.get("run", run_id) == run_id for card in cards):
        raise ConfigError(f"{output / EXPORT_FOLDER} has no export of {folder}: run `tff-pdp export` {or_else}")


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object.

    Raises:
      DataError: the file is missing, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): restore it from a copy") from None
    return content


def _summary(output: Path, path: Path, recomputed: Recomputed | None) -> str:
    content = read_json(path)
    if recomputed is None:
        return "read; not compared, as the record cannot be read"
    try:
        places = [_place(path, recomputed, row.get("run"), name) for name, row in content["algorithms"].items()]
        if "silos" in content:
            _check_silos(output, path, content, recomputed, places)
        else:
            _check_users(path, content, recomputed, places)
        composed = content["privacy"]["composed"]
        scopes = [silo["id"] for silo in content["silos"]] if "silos" in content else list(recomputed.composed)
        _check_composed(output, path, composed, scopes, recomputed, list(content["algorithms"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): run `tff-pdp evaluate` again") from None
    together = "none" if composed["epsilon"] is None else f"{composed['epsilon']:.6g}"
    return f"agrees with the ledgers; epsilon of everything on record together: {together}"


def _place(path: Path, recomputed: Recomputed, run_id: str | None, name: str) -> int:
    place = recomputed.of(run_id, name)
    if place is None:
        raise DataError(f"{path} is about a run of {name} that is not on record")
    return place


def _check_silos(
    output: Path, path: Path, content: Mapping[str, Any], recomputed: Recomputed, places: Sequence[int]
) -> None:
    for silo in content["silos"]:
        own = [recomputed.own[place].get(silo["id"], math.inf) for place in places]
        ledgers = [recomputed.releases[place].ledger for place in places]
        budgets = [ledger.budgets[silo["id"]] for ledger in ledgers if ledger and silo["id"] in ledger.budgets]
        expected = max(own, default=math.inf)
        if math.isfinite(expected) and any(ledger and ledger.follows_from_a_choice(silo["id"]) for ledger in ledgers):
            expected = max(budget.epsilon for budget in budgets)
        _compare(path, f"of {silo['id']}", silo["epsilon_spent"], expected)
        if silo["epsilon_spent"] is not None and silo["delta"] not in {budget.delta for budget in budgets}:
            raise DataError(f"{path} states delta {silo['delta']} of {silo['id']}, a delta that no ledger has")


def _check_users(path: Path, content: Mapping[str, Any], recomputed: Recomputed, places: Sequence[int]) -> None:
    # There is one scope, of all users.
    own = [max(recomputed.own[place].values(), default=math.inf) for place in places]
    for (name, row), expected in zip(content["algorithms"].items(), own, strict=True):
        _compare(path, f"of every user by {name}", row["epsilon_spent"], expected)
    _compare(path, "of every user", content["privacy"]["users"]["epsilon_spent"], max(own, default=math.inf))


def _compare(path: Path, of_whom: str, stated: float | None, expected: float) -> None:
    """Checks a stated epsilon; None promises nothing, so that nothing is to be checked."""
    if stated is not None and not math.isclose(stated, expected, rel_tol=1e-6):
        what = f"adds up to {expected:.6g}" if math.isfinite(expected) else "has no bound"
        raise DataError(
            f"{path} states epsilon {stated:.6g} {of_whom}, but the ledger {what}: if the run has gone on since, run "
            "`tff-pdp evaluate` again"
        )


def _check_composed(
    output: Path,
    path: Path,
    composed: Mapping[str, Any],
    scopes: Sequence[str],
    recomputed: Recomputed,
    names: Sequence[str],
) -> None:
    """Checks the epsilon of all runs together: it must cover all runs on record by now."""
    if composed["epsilon"] is None:
        return
    if recomputed.why_no_bound:
        raise DataError(f"{path} states epsilon {composed['epsilon']:.6g} of all runs, but {recomputed.why_no_bound}")
    expected = max(recomputed.composed[scope] for scope in scopes)
    if not is_at_most(expected, composed["epsilon"]):
        raise DataError(
            f"{path} states epsilon {composed['epsilon']:.6g} of {composed['methods']} runs together, but all "
            f"runs on record add up to {expected:.6g}: run `tff-pdp evaluate` again"
        )
    delta = max(recomputed.deltas[scope] for scope in scopes)
    if not is_at_most(delta, composed["delta"]):
        raise DataError(f"{path} states delta {composed['delta']:g} of all runs, which together need {delta:g}")


def _client_id_key(output: Path, path: Path) -> str:
    """Checks that the key that clients' ids are hashed with is the key of the exports that have hashed ids."""
    fingerprint = ClientIdHash.load(path).fingerprint
    for version in export_versions(output):
        with contextlib.suppress(DataError):
            card = read_json(version / layout.MODEL_CARD_FILE)
            if card.get("client_id_key", fingerprint) != fingerprint:
                raise ServingError(f"{path} is not the key of the ids in {version}: restore it from a copy")
    return "the key of all exports that have hashed ids"


def _export(output: Path, version: Path, recomputed: Recomputed | None) -> tuple[Status, str]:
    layout.check_manifest(version)
    card, report = read_json(version / layout.MODEL_CARD_FILE), read_json(version / layout.PRIVACY_REPORT_FILE)
    files = "all files are as the manifest says"
    if recomputed is None:
        return Status.OK, f"{files}; the privacy report was not compared, as the record cannot be read"
    place = recomputed.of(card.get("run"), str(card.get("algorithm")))
    if place is None:
        return Status.ABSENT, f"{files}; the exported run is not on record here, so the privacy report was not compared"
    own = _of_exported_rounds(output, card) or recomputed.own[place]
    stated = _stated(output, card, report, list(own))
    for scope, epsilon in stated.items():
        known = list(own.values()) if scope is None else [own.get(scope, math.inf)]
        for expected in known:
            if epsilon is not None and not is_at_most(expected, epsilon):
                raise DataError(
                    f"{version / layout.PRIVACY_REPORT_FILE} states epsilon {epsilon:.6g}"
                    f"{'' if scope is None else f' of {scope}'}, but the ledger adds up to {expected:.6g}"
                )
    return Status.OK, f"{files}; the privacy report states at least the epsilons of the ledger"


@worked_out_anew()
def _of_exported_rounds(output: Path, card: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns epsilons of an exported model whose run has gone on since, by scope; empty for all other models."""
    charges = read_charges(output / str(card.get("algorithm")))
    if charges is None or charges.run_id != card.get("run"):
        return {}
    for extension in charges.extensions:
        ledger = extension.earlier.ledger
        if extension.after_round == card.get("rounds") and ledger is not None and not charges.identity.non_private:
            return {scope: ledger.epsilon(scope).best for scope in ledger.budgets}
    return {}


def _stated(
    output: Path, card: Mapping[str, Any], report: Mapping[str, Any], scopes: Sequence[str]
) -> dict[str | None, float | None]:
    """Returns the epsilons of a privacy report, by scope of the ledger; a statement on all scopes has key None."""
    if "silos" not in report:
        key = "epsilon" if report.get("unit") == "user" else "epsilon_at_most"
        return {None: report.get(key)}
    trained = {silo["id"]: silo["epsilon"] for silo in report["silos"] if not silo.get("added_after_training")}
    if card.get("client_id_kind") == "plain":
        return dict(trained)
    with contextlib.suppress(ServingError):
        hashed = ClientIdHash.load(output / CLIENT_ID_KEY)
        if hashed.fingerprint == card.get("client_id_key"):
            return {scope: trained[hashed(scope)] for scope in scopes if hashed(scope) in trained}
    # Without the key it is not known whose epsilon is which; the largest holds for all.
    epsilons = [epsilon for epsilon in trained.values() if epsilon is not None]
    return {None: max(epsilons)} if len(epsilons) == len(trained) and epsilons else {}
