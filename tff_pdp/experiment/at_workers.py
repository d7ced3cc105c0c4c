"""Describes a method's examples and parameters so that workers make both for themselves, from the client dataset."""

import collections
import dataclasses
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.digests import Prefix, prefix_of
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import FarValues
from tff_pdp.errors import DataError
from tff_pdp.experiment.before_training import SiloReleases
from tff_pdp.experiment.config import ExperimentConfig, experiment_of
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.privacy.plans.extension import EarlierRounds

# Methods that a worker keeps ready, and methods that head and workers know how to build.
_KEPT_METHODS, _KNOWN_METHODS = 8, 64


@dataclasses.dataclass(frozen=True)
class Setup:
    """Has all that a worker needs to build a method.

    Attributes:
      config: the resolved experiment as plain data, without workers.
      name: name of the method in the experiment.
      folder: working folder of the head, to which paths in the experiment are relative.
      clients: folder or fsspec URL of the client dataset; empty for the experiment's own folder.
      manifest: digest of the client dataset's manifest.
      releases: what silos have released before training.
      build_method: the function of that name, which a worker imports by its name.
      earlier: rounds that a run had made before it went on after its end; None for other runs.
    """

    config: Mapping[str, Any]
    name: str
    folder: str
    clients: str
    manifest: Prefix
    releases: SiloReleases
    build_method: Callable[..., Method]
    earlier: EarlierRounds | None = None

    def build(self) -> Method:
        """Builds the method, at a worker."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        config = experiment_of(dict(self.config), "the experiment that the head has sent")
        clients = ClientDataset.open(self.clients or config.clients_folder)
        if prefix_of(clients.path / MANIFEST_FILE) != self.manifest:
            raise DataError(f"{self.clients or config.clients_folder} is another client dataset than that of the head")
        return self.build_method(config, self.name, clients=clients, releases=self.releases, earlier=self.earlier)


@dataclasses.dataclass(frozen=True)
class MethodAddress:
    """Names a method for workers.

    Attributes:
      setup_key: digest of the method's `Setup`.
      is_first_phase: whether the method is that of the first phase, on synthetic data.
    """

    setup_key: str
    is_first_phase: bool = False


@dataclasses.dataclass(frozen=True)
class ExamplesRecipe:
    """Makes the examples of a split; rows are positions in the client dataset.

    Attributes:
      method: the method.
      split: name of the split.
      is_lasting: whether a later call needs the same clients' examples again.
    """

    method: MethodAddress
    split: str
    is_lasting: bool

    @property
    def setup_key(self) -> str:
        """Digest of the setup that the worker needs."""
        return self.method.setup_key

    def load(self, host: "MethodHost", rows: np.ndarray, member_type: Any) -> ClientValues:
        """Reads the examples of some clients."""
        del member_type
        return host.examples(self.method, self.split).select(rows)


@dataclasses.dataclass(frozen=True)
class ParamsRecipe:
    """Makes the parameters of clients in a round; rows are positions in `places`.

    Attributes:
      method: the method.
      run_key: the run's secret.
      round_number: number of the round.
      places: positions of the clients in the client dataset.
      changed: hyper-parameters by name that replace the method's own, each an array `[places]`.
      run: number of the client's run, as in `RunKey.client_seed`.
    """

    method: MethodAddress
    run_key: RunKey
    round_number: int
    places: np.ndarray
    changed: Mapping[str, np.ndarray]
    run: int
    is_lasting = False

    @property
    def setup_key(self) -> str:
        """Digest of the setup that the worker needs."""
        return self.method.setup_key

    def load(self, host: "MethodHost", rows: np.ndarray, member_type: Any) -> ClientValues:
        """Computes the parameters of some clients."""
        del member_type
        return self.made_by(host.method(self.method).client_params, rows)

    def made_by(self, client_params: Callable[..., ClientValues], rows: np.ndarray) -> ClientValues:
        """Computes the parameters of some clients by the method's `client_params`."""
        changed = {name: values[rows] for name, values in self.changed.items()}
        return client_params(self.run_key, self.round_number, self.places[rows], changed=changed, run=self.run)


class MethodHost:
    """Builds methods at a worker, and keeps them with their examples."""

    def __init__(self):
        """Prepares to build methods when they are asked for."""
        self._setups: collections.OrderedDict[str, Setup] = collections.OrderedDict()
        self._built = functools.lru_cache(_KEPT_METHODS)(lambda key: self._setups[key].build())
        self._examples = functools.lru_cache(2 * _KEPT_METHODS)(self._read)

    def knows(self, key: str) -> bool:
        """Checks if the worker has the setup with this digest; if so, the setup is needed, and is forgotten later."""
        if key in self._setups:
            self._setups.move_to_end(key)
        return key in self._setups

    def learn(self, key: str, setup: Setup) -> None:
        """Keeps a setup under its digest."""
        self._setups[key] = setup
        while len(self._setups) > _KNOWN_METHODS:
            self._setups.popitem(last=False)

    def method(self, address: MethodAddress) -> Method:
        """Returns the method, or the phase of a method, that an address names."""
        method = self._built(address.setup_key)
        return method.first_phase or method if address.is_first_phase else method

    def computation(self, address: tuple[MethodAddress, str]) -> Any:
        """Returns a TFF computation of a method, by the computation's name in `PersonalizedProcess`."""
        method, name = address
        return getattr(self.method(method).process, name)

    def examples(self, address: MethodAddress, split: str) -> Examples:
        """Returns the reader of a split's examples."""
        return self._examples(address, split)

    def _read(self, address: MethodAddress, split: str) -> Examples:
        return self.method(address).examples(split)


class FarExamples(Examples):
    """Describes one split of all clients; workers read the examples."""

    def __init__(self, method: Method, address: MethodAddress, split: str):
        """Wraps one split of a method's source of examples."""
        super().__init__(method.source or method.clients, split, method.model, method.scalings)
        self._address, self._split_name = address, split
        self._feature_shape = tuple(method.model.input_shape)

    def select(self, places: Sequence[int] | np.ndarray) -> ClientValues:
        """Describes the examples of the clients at `places` in the dataset, in this order; reads nothing."""
        chosen = np.asarray(places, np.int64)
        shapes = [((size, *self._feature_shape), (size,)) for size in self.padded(chosen).tolist()]
        # Cohorts that are drawn at random do not come again.
        recipe = ExamplesRecipe(self._address, self._split_name, len(chosen) == self.num_clients)
        return FarValues(self.member_type, recipe, chosen, super().select, shapes)


@dataclasses.dataclass(frozen=True)
class MethodAtWorkers(Method):
    """A method whose examples and parameters are made by workers; all else is as in `Method`.

    Attributes:
      address: the way in which a worker builds the method.
    """

    address: MethodAddress = dataclasses.field(kw_only=True)
    is_at_workers = True

    def examples(self, split: str) -> Examples:
        """Returns a description of clients' examples of one split, padded to a few sizes."""
        return FarExamples(self, self.address, split)

    def client_params(
        self,
        run_key: RunKey,
        round_number: int,
        places: Sequence[int] | np.ndarray | None = None,
        *,
        changed: Mapping[str, np.ndarray] | None = None,
        run: int = 0,
    ) -> ClientValues:
        """Describes the parameters of clients in one round; arguments are as in `Method.client_params`."""
        chosen = np.arange(len(self.clients.client_ids)) if places is None else np.asarray(places, np.int64)
        recipe = ParamsRecipe(self.address, run_key, round_number, chosen, dict(changed or {}), run)
        bring = functools.partial(recipe.made_by, super().client_params)
        return FarValues(self.client_params_type, recipe, np.arange(len(chosen)), bring)


class Directory:
    """Knows the computations and setups of all methods at workers, for the engine of this process."""

    def __init__(self):
        """Starts without any method."""
        # By identity; the computation is kept, so that no other has the same.
        self._addresses: dict[int, tuple[Any, tuple[MethodAddress, str]]] = {}
        self._setups: dict[str, Setup] = {}

    def address_of(self, computation: Any) -> tuple[MethodAddress, str] | None:
        """Returns the address of a computation for workers; None for a computation of this process alone."""
        found = self._addresses.get(id(computation))
        return found and found[1]

    def setup(self, key: str) -> Setup:
        """Returns the setup with a digest."""
        return self._setups[key]

    def place(self, method: Method, setup: Setup) -> Method:
        """Returns a method whose clients are computed by workers, which build the method by `setup`."""
        key = hashlib.sha256(pickle.dumps(setup)).hexdigest()
        self._setups[key] = setup
        while len(self._setups) > _KNOWN_METHODS:
            forgotten = next(iter(self._setups))
            del self._setups[forgotten]
            self._addresses = {
                one: found for one, found in self._addresses.items() if found[1][0].setup_key != forgotten
            }
        placed = self._placed(method, MethodAddress(key))
        if method.first_phase is None:
            return placed
        first = self._placed(method.first_phase, MethodAddress(key, is_first_phase=True))
        return dataclasses.replace(placed, first_phase=first)

    def _placed(self, method: Method, address: MethodAddress) -> Method:
        for name in (field.name for field in dataclasses.fields(method.process)):
            computation = getattr(method.process, name)
            if computation is not None:
                self._addresses.setdefault(id(computation), (computation, (address, name)))
        fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(Method)}
        return MethodAtWorkers(**fields, address=address)


DIRECTORY = Directory()


def at_workers(
    method: Method,
    config: ExperimentConfig,
    name: str,
    releases: SiloReleases,
    build_method: Callable[..., Method],
    earlier: EarlierRounds | None = None,
) -> Method:
    """Returns a method whose clients are computed by the workers that the experiment's engine starts.

    Args:
      method: the method, for a computation in one process.
      config: the experiment.
      name: name of the method in the experiment.
      releases: what silos have released before training.
      build_method: function by which workers build the method.
      earlier: rounds that a run had made before it went on after its end; None for other runs.
    """
    content = config.to_dict()
    workers = content["training"].pop("workers")
    manifest = prefix_of(method.clients.path / MANIFEST_FILE)
    return DIRECTORY.place(
        method, Setup(content, name, os.getcwd(), workers["clients"], manifest, releases, build_method, earlier)
    )
