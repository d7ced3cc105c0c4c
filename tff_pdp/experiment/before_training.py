"""Releases silos' statistics before training, once for all methods of an experiment, and stores them for reuse."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.digests import read_json, write_json
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import RELEASES_FILE, ExperimentConfig
from tff_pdp.experiment.synthetic_data import PlannedData, ReleaseKey, SyntheticClients, plan_data
from tff_pdp.files import remove_attempts
from tff_pdp.lock import only_writer
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.privacy.mechanisms.feature_scaling import FeatureScaling, Scaler, Scalings
from tff_pdp.privacy.mechanisms.silo_statistics import (
    NumExamples,
    SiloStatistics,
    StatisticsSettings,
    planned_events,
    release_silo_statistics,
    statistics_generator,
)
from tff_pdp.privacy.plans.plan import FixedEvents
from tff_pdp.registry.entries import Registry
from tff_pdp.settings import read_settings, to_plain

FORMAT_VERSION = 1
# The name of these releases in the registry, in place of a method's.
STATISTICS = "statistics before training"
PRIVACY_IS_OFF = "privacy is switched off"


@dataclasses.dataclass(frozen=True)
class PlannedReleases:
    """The releases before training, as they follow from public settings.

    Attributes:
      statistics: settings of the statistics.
      data: the releases of synthetic data; None without synthetic data.
      num_examples: number of training examples by client id, at least 1; None if the numbers are to be noised.
      events: the privacy events of the releases, with the purpose of each release, by client id.
      unsound: reason why no privacy can be claimed; empty if privacy can be claimed.
    """

    statistics: StatisticsSettings
    data: PlannedData | None
    num_examples: Mapping[str, int] | None
    events: Mapping[str, FixedEvents]
    unsound: str


@dataclasses.dataclass(frozen=True)
class SiloReleases:
    """The values that are known of each silo before training: public values, or values released under DP.

    Attributes:
      statistics: released statistics of each silo, by client id.
      scalings: shift and scale of features, by client id; empty if features are used as they are.
      synthetic: silos' synthetic data; None without synthetic data.
    """

    statistics: Mapping[str, SiloStatistics]
    scalings: Mapping[str, FeatureScaling]
    synthetic: SyntheticClients | None = None

    @property
    def num_examples(self) -> dict[str, int]:
        """Number of training examples, public or noised, by client id."""
        return {client_id: one.num_examples for client_id, one in self.statistics.items()}

    def digest(self) -> str:
        """Returns a hash of the statistics, scalings and synthetic data, which affect training."""
        digest = hashlib.sha256(_encode(self.statistics).encode())
        for client_id, scaling in self.scalings.items():
            digest.update(client_id.encode() + scaling.shift.tobytes() + scaling.scale.tobytes())
        if self.synthetic is not None:
            digest.update(self.synthetic.sha256.encode())
        return digest.hexdigest()


def plan_releases(config: ExperimentConfig, clients: ClientDataset) -> PlannedReleases:
    """Plans silos' releases before training; nothing is released.

    Raises:
      ConfigError: a setting is unknown or out of range.
      BudgetError: a silo's budget does not pay for a release.
    """
    privacy, shape = config.privacy, clients.manifest.features.shape
    statistics = StatisticsSettings(privacy.num_examples.epsilon, privacy.feature_scaling.moments(shape))
    # Refuses unfit constants.
    privacy.feature_scaling.public(shape)
    data = plan_data(config, clients)
    events = {one: (*planned_events(statistics), *(data.events(one) if data else ())) for one in clients.client_ids}
    sizes = {client_id: max(1, clients.num_examples(client_id, "train")) for client_id in clients.client_ids}
    return PlannedReleases(
        statistics=statistics,
        data=data,
        num_examples=sizes if statistics.count_epsilon is None else None,
        events=events,
        unsound=privacy.feature_scaling.why_not_private or (data.generator.why_not_private if data else ""),
    )


def release_before_training(config: ExperimentConfig, clients: ClientDataset, planned: PlannedReleases) -> SiloReleases:
    """Returns the silos' stored releases; makes and stores the releases if there are none.

    Guarantee: each statistic and each silo's synthetic data are released only once for an experiment's folder, and are
      included in `PlannedReleases.events`. Before the release, it is entered into the registry, so that releases in
      several folders add up. The ledger of each method is charged for the release. The joint cost of several methods is
      therefore an upper bound that includes the release more than once.
    Assumes: as in `release_silo_statistics` and `Generator.fit`.

    Raises:
      ConfigError: a record does not suit a setting, or the folder holds releases made with other settings.
      DataError: the stored releases cannot be read, or another process is making them.
    """
    synthetic = None
    if any(planned.events.values()):
        statistics, sha256 = _released_once(config, clients, planned.statistics, planned.data)
        if planned.data is not None:
            synthetic = SyntheticClients(Path(config.output), clients.client_ids, sha256)
    else:
        sizes = {client_id: clients.num_examples(client_id, "train") for client_id in clients.client_ids}
        statistics = {client_id: SiloStatistics(max(1, size)) for client_id, size in sizes.items()}
    return SiloReleases(
        statistics=statistics,
        scalings=_scalings(clients, config.privacy.feature_scaling, statistics),
        synthetic=synthetic,
    )


def _released_once(
    config: ExperimentConfig, clients: ClientDataset, settings: StatisticsSettings, data: PlannedData | None
) -> tuple[dict[str, SiloStatistics], str]:
    """Returns silos' statistics and the SHA-256 of the file of synthetic data; empty without synthetic data."""
    path = Path(config.output) / RELEASES_FILE
    if not path.exists():
        # Two methods of an experiment that are trained at once would release twice.
        with only_writer(path):
            if not path.exists():
                return _release(config, clients, settings, data, path)
    return _read(config, clients, data, path)


def _read(
    config: ExperimentConfig, clients: ClientDataset, data: PlannedData | None, path: Path
) -> tuple[dict[str, SiloStatistics], str]:
    """Reads the releases, and checks that they were made with these settings and data."""
    stored = read_releases(path)
    try:
        statistics = {name: SiloStatistics.from_dict(one) for name, one in stored["silos"].items()}
        earlier = _typed(stored["made_with"])
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise DataError(f"{path}: the silos' releases before training cannot be read ({error})") from None
    registry = Registry(config.privacy.registry)
    # The first version had a digest without a key.
    unkeyed = hashlib.sha256((config.clients_folder / MANIFEST_FILE).read_bytes()).hexdigest()
    names = (registry.keep_dataset(clients, ("train",)), unkeyed)
    if earlier in [_typed(_made_with(config, name, data)) for name in names]:
        # A command that was killed after the release may have left the key.
        ReleaseKey.destroy(path.parent)
        return statistics, stored.get("synthetic_sha256", "")
    kept = stored.get("registry_key")
    if kept is not None and kept != registry.key().fingerprint():
        # Data are named by keyed digests, which another registry cannot compare.
        raise ConfigError(
            f"{path}: the silos' releases before training are in another registry than {registry.folder}, and so are "
            "not counted. Name that other registry by privacy.registry or XDG_STATE_HOME, or restore it from a copy"
        )
    # An earlier version did not say which registry.
    counts = f"The registry {registry.folder} counts old and new releases on the same records together"
    unknown = f"If the releases are in another registry than {registry.folder}, name that registry, which counts them"
    raise ConfigError(
        f"{path}: the silos' releases before training were made with other settings or other data. To release again, "
        f"which costs budget again, name another output folder. {unknown if kept is None else counts}"
    )


def _release(
    config: ExperimentConfig,
    clients: ClientDataset,
    settings: StatisticsSettings,
    data: PlannedData | None,
    path: Path,
) -> tuple[dict[str, SiloStatistics], str]:
    registry = Registry(config.privacy.registry)
    # With an unkeyed digest, anyone who knows all other records could test whether some record is in the data.
    made_with = _made_with(config, registry.keep_dataset(clients, ("train",)), data)
    if data is not None:
        data.check(clients)
    key = ReleaseKey.keep(
        path.parent, made_with, config.training.test_only_seed, lambda one: registry.find(one) is not None
    )
    _enter(config, clients, settings, data, key.release_id)
    statistics = {
        client_id: release_silo_statistics(
            clients.load(client_id, "train").x,
            settings,
            statistics_generator(client_id, config.training.test_only_seed),
        )
        for client_id in clients.client_ids
    }
    sha256 = "" if data is None else data.make(clients, key, path.parent)
    remove_attempts(path.parent, path.name)
    content = {
        "made_with": made_with,
        "registry_key": registry.key().fingerprint(),
        "release_id": key.release_id,
        **({} if data is None else {"synthetic_sha256": sha256}),
        "silos": json.loads(_encode(statistics)),
    }
    # On disk before anything is done with the statistics: if they were lost, the next command would release again.
    write_json(path, {"format_version": FORMAT_VERSION, **content})
    ReleaseKey.destroy(path.parent)
    return statistics, sha256


def read_releases(path: Path) -> dict[str, Any]:
    """Reads the stored releases (keys `made_with`, `silos`); a file without `format_version` needs no digest.

    Raises:
      DataError: the file is missing, damaged, or of another format version.
    """
    content = read_json(path, undigested=(None,))
    if content.pop("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise DataError(f"{path} has another format version than {FORMAT_VERSION}, the only version that can be read")
    return content


def released_id(config: ExperimentConfig) -> str:
    """Returns the registry's id of the experiment's releases before training; empty if there are none."""
    path = Path(config.output) / RELEASES_FILE
    # The file is written in one move, and `build_method` has read it before.
    return read_releases(path).get("release_id", "") if path.exists() else ""


def _enter(
    config: ExperimentConfig,
    clients: ClientDataset,
    settings: StatisticsSettings,
    data: PlannedData | None,
    release_id: str,
) -> None:
    """Enters a release before training into the registry, unless a killed command has entered it already.

    Raises:
      BudgetError: the release would overspend a silo's budget; nothing was entered or released.
    """
    registry = Registry(config.privacy.registry)
    ledger = None
    if config.privacy.is_private:
        budgets = config.privacy.budgets_of(clients.client_ids)
        ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, budgets)
        for client_id in budgets:
            for event, reason in (*planned_events(settings), *(data.events(client_id) if data else ())):
                ledger.append(client_id, event, 1, reason)
    seeded = config.training.test_only_seed is not None
    registry.begin(
        release_id,
        STATISTICS,
        Path(config.output),
        records=registry.keep_dataset(clients, ("train",)),
        record_set=config.data.record_set,
        non_private=FIXED_SEED
        if seeded
        else PRIVACY_IS_OFF
        if ledger is None
        else (data.generator.why_not_private or None if data else None),
        ledger=ledger,
        rounds=1,
    )


def _made_with(config: ExperimentConfig, records: str, data: PlannedData | None) -> dict[str, Any]:
    return {
        **({} if data is None else {"synthetic": data.to_dict()}),
        "num_examples": to_plain(config.privacy.num_examples),
        "feature_scaling": to_plain(config.privacy.feature_scaling),
        "test_only_seed": config.training.test_only_seed,
        "data": records,
    }


def _typed(made_with: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings that decided releases, with the defaults that an earlier version left out."""
    source = "the silos' releases before training"
    return {
        **made_with,
        "num_examples": read_settings(NumExamples, made_with["num_examples"], source),
        "feature_scaling": read_settings(Scalings, made_with["feature_scaling"], source),
    }


def _scalings(
    clients: ClientDataset, scaler: Scaler, statistics: Mapping[str, SiloStatistics]
) -> dict[str, FeatureScaling]:
    """Returns the scalings by client id; empty if features are used as they are."""
    if scaler.changes_nothing:
        return {}
    public = scaler.public(clients.manifest.features.shape)
    if public is not None:
        # Known without reading anyone's examples.
        return dict.fromkeys(clients.client_ids, public)
    return {
        client_id: scaler.scaling(statistics[client_id], clients.load(client_id, "train").x)
        for client_id in clients.client_ids
    }


def _encode(statistics: Mapping[str, SiloStatistics]) -> str:
    return json.dumps({client_id: one.to_dict() for client_id, one in statistics.items()}, sort_keys=True)
