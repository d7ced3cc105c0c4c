"""Makes silos' synthetic data before training, stores them in the experiment's folder, and reads them as examples."""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from tff_pdp.data.client_dataset import ClientDataset, ClientExamples
from tff_pdp.digests import prefix_of, read_json, write_json
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import RELEASES_FILE, ExperimentConfig
from tff_pdp.files import atomic_file, overwrite_and_remove, remove_attempts
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.plans.plan import FixedEvents
from tff_pdp.privacy.synthetic.base import Generator
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC
from tff_pdp.settings import to_plain

DATA_FILE = "synthetic_data.npz"
# Exists from just before a release until its results are stored.
KEY_FILE = "silo_releases.key.json"


@dataclasses.dataclass(frozen=True)
class ReleaseKey:
    """The secret of a release before training, with which a killed command repeats the release with the same noise.

    Attributes:
      release_id: id of the release in the registry.
      secret: 32 bytes, from which the noise follows.
    """

    release_id: str
    secret: bytes

    @classmethod
    def keep(
        cls,
        folder: Path,
        made_with: Mapping[str, Any],
        test_only_seed: int | None,
        is_on_record: Callable[[str], bool],
    ) -> "ReleaseKey":
        """Reads the key of an unfinished release with the same settings and data, or makes and stores a key.

        Guarantee: releases with other settings, or of other data, never have the same noise.

        Args:
          folder: folder of the experiment.
          made_with: all that decides the release.
          test_only_seed: seed that the secret follows from; None for the operating system's entropy.
          is_on_record: whether a release with a given id may have been made.

        Raises:
          ConfigError: another release in this folder may have been made, and was not finished.
          DataError: the stored key is damaged, or synthetic data are here without the record of their release.
        """
        path = folder / KEY_FILE
        is_for = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()
        stored = read_json(path) if path.exists() else {}
        if stored.get("is_for") != is_for:
            if stored and is_on_record(stored["release_id"]):
                raise ConfigError(
                    f"{folder}: a release before training with other settings, or of other data, was begun here, and "
                    "its cost counts. Go back to its settings to finish it. To release again, which costs budget "
                    "again, name another output folder"
                )
            if (folder / DATA_FILE).exists():
                raise DataError(
                    f"{folder / RELEASES_FILE} is missing beside {DATA_FILE}: restore it from a copy, or name another "
                    "output folder to release again, which costs budget again"
                )
            cls.destroy(folder)
            secret = secrets.token_bytes(32)
            if test_only_seed is not None:
                secret = hashlib.sha256(f"test-only releases {test_only_seed} {is_for}".encode()).digest()
            folder.mkdir(parents=True, exist_ok=True)
            earlier = os.umask(0o077)
            try:
                stored = {"release_id": secrets.token_hex(16), "secret": secret.hex(), "is_for": is_for}
                write_json(path, stored)
            finally:
                os.umask(earlier)
        return cls(stored["release_id"], bytes.fromhex(stored["secret"]))

    @staticmethod
    def destroy(folder: Path) -> None:
        """Overwrites and removes the stored key, once the results of the release are stored."""
        with contextlib.suppress(FileNotFoundError):
            overwrite_and_remove(folder / KEY_FILE)

    def draws(self, silo: str) -> ExactDraws:
        """Returns the draws for a silo's synthetic data."""
        return ExactDraws(hashlib.sha256(self.secret + b"synthetic data of " + silo.encode()).digest())


@dataclasses.dataclass(frozen=True)
class PlannedData:
    """The synthetic data that each silo is to release.

    Attributes:
      generator: public settings of the generator.
      noise_multipliers: noise multiplier of each silo's release, by client id.
    """

    generator: Generator
    noise_multipliers: Mapping[str, float]

    def events(self, client_id: str) -> FixedEvents:
        """Returns the event of a silo's release, with its purpose, under ADD_OR_REMOVE_ONE adjacency."""
        return ((self.generator.event(self.noise_multipliers[client_id]), SYNTHETIC),)

    def to_dict(self) -> dict[str, Any]:
        """Returns all that decides the releases besides records, as plain data for JSON."""
        content = {"generator": to_plain(self.generator), "noise_multipliers": dict(self.noise_multipliers)}
        return json.loads(json.dumps(content))

    def check(self, clients: ClientDataset) -> None:
        """Checks all silos' records before anything is charged or released.

        Raises:
          ConfigError, DataError: as in `Generator.check`; the message names the silo.
        """
        for client_id in clients.client_ids:
            records = clients.load(client_id, "train")
            with _naming(client_id):
                self.generator.check(records.x, records.y)

    def make(self, clients: ClientDataset, key: ReleaseKey, folder: Path) -> str:
        """Makes the synthetic data of all silos, stores them in `folder`, and returns the SHA-256 of the file.

        Guarantee: `events` covers each silo's data. A file that a killed command has finished is kept: on another
          machine, a repetition might add the same noise to sums that are rounded differently.
        Assumes: every silo's events are charged; the key is secret, and is the key of a file that is there already.

        Raises:
          ConfigError, DataError: as in `Generator.fit`; the message names the silo.
        """
        names = clients.client_ids
        if (folder / DATA_FILE).exists():
            return prefix_of(folder / DATA_FILE).sha256
        remove_attempts(folder, DATA_FILE)
        with atomic_file(folder / DATA_FILE) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            for number, client_id in enumerate(tqdm(names, "synthetic data", unit="silo", disable=None)):
                records = clients.load(client_id, "train")
                with _naming(client_id):
                    made = self.generator.fit(
                        records.x, records.y, self.noise_multipliers[client_id], key.draws(client_id)
                    )
                for name, array in (("x", made.x.astype(np.float32)), ("y", made.y)):
                    with archive.open(f"{name}_{number}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
        return prefix_of(folder / DATA_FILE).sha256


@contextlib.contextmanager
def _naming(client_id: str):
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"privacy.synthetic: silo {client_id!r}: {error}") from None


def plan_data(config: ExperimentConfig, clients: ClientDataset) -> PlannedData | None:
    """Plans silos' synthetic data, each within its part of the silo's budget; None if the experiment has none.

    Raises:
      ConfigError, BudgetError: the section `privacy.synthetic` does not suit the data set or a budget.
    """
    section = config.privacy.synthetic
    if section is None:
        return None
    generator = section.for_classes(clients.manifest.features.num_classes)
    budgets = config.privacy.calibrated_budgets(clients.client_ids)
    noise = {budget: section.noise_multiplier(budget) for budget in set(budgets.values())}
    return PlannedData(generator, {client_id: noise[budget] for client_id, budget in budgets.items()})


def check_data(folder: Path, sha256: str) -> None:
    """Checks that an experiment's folder has the silos' synthetic data that were released.

    Raises:
      DataError: the file is missing, or its SHA-256 is not `sha256`.
    """
    path = folder / DATA_FILE
    if not path.is_file():
        raise DataError(
            f"{path} is missing: restore the silos' synthetic data from a copy; another release costs again"
        )
    if prefix_of(path).sha256 != sha256:
        raise DataError(f"{path} is damaged, or of another release: restore it from a copy")


class SyntheticClients:
    """Silos' synthetic data, in place of a client dataset's training examples.

    Attributes:
      client_ids: ids of all silos, in the order of the client dataset.
      sha256: SHA-256 of the file.
    """

    def __init__(self, folder: Path, client_ids: tuple[str, ...], sha256: str):
        """Reads all synthetic data of an experiment's folder.

        Raises:
          DataError: the file is missing, or is not the one that was released.
        """
        check_data(folder, sha256)
        self.client_ids, self.sha256 = client_ids, sha256
        with np.load(folder / DATA_FILE, allow_pickle=False) as stored:
            self._examples = {
                client_id: ClientExamples(stored[f"x_{number}"], stored[f"y_{number}"])
                for number, client_id in enumerate(client_ids)
            }

    @property
    def has_images(self) -> bool:
        """True if examples are images of one or three channels."""
        shape = self._examples[self.client_ids[0]].x.shape[1:]
        return len(shape) == 3 and shape[-1] in (1, 3)

    def num_examples(self, client_id: str, split: str = "train") -> int:
        """Counts a silo's synthetic examples, which are all for training."""
        return len(self.load(client_id, split).y)

    def sizes(self, split: str) -> np.ndarray:
        """Counts every silo's synthetic examples: int64 `[silos]`."""
        return np.array([self.num_examples(client_id, split) for client_id in self.client_ids], np.int64)

    def load_many(self, places: np.ndarray, split: str) -> ClientExamples:
        """Returns the synthetic examples of the silos at `places`, one silo after another; errors are as in `load`."""
        found = [self.load(self.client_ids[place], split) for place in places]
        return ClientExamples(np.concatenate([one.x for one in found]), np.concatenate([one.y for one in found]))

    def load(self, client_id: str, split: str = "train") -> ClientExamples:
        """Returns a silo's synthetic examples; raises ValueError for any other split than `train`."""
        if split != "train":
            raise ValueError(f"there are no synthetic examples for {split}")
        return self._examples[client_id]


def synthetic_images(source: object) -> dict[str, ClientExamples]:
    """Returns the synthetic images of each silo, by client id.

    The result is empty if the source is no synthetic data, or if examples are not images of one or three channels.
    """
    if not isinstance(source, SyntheticClients) or not source.has_images:
        return {}
    return {client_id: source.load(client_id) for client_id in source.client_ids}
