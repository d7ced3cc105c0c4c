"""From an experiment's configuration to the values a run works with."""

import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.algorithms.auto_prox_parameters import SiloParameters
from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.config import ExperimentConfig
from tff_pdp.data.buckets import bucket_sizes
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.privacy.dp_sgd import build_dp_sgd
from tff_pdp.privacy.feature_scaling import FeatureScaling
from tff_pdp.privacy.plan import PlannedTraining, PrivacyPlan
from tff_pdp.privacy.selection import build_selector
from tff_pdp.processes.compose import (
    PersonalizedProcess,
    client_data_type,
    client_params_columns,
    client_params_type,
    compose,
)
from tff_pdp.registry import MODELS, PLANS, lookup
from tff_pdp.runtime.algorithm_settings import AUTO, build_algorithm, hparam_columns
from tff_pdp.runtime.client_values import ClientValues
from tff_pdp.runtime.engines import ENGINES, Engine, running_engine
from tff_pdp.runtime.run_key import RunKey
from tff_pdp.runtime.search_settings import build_search
from tff_pdp.runtime.silo_releases import SiloReleases, release_before_training

# A call over stacked clients takes about as long, before it computes anything, as so many weights times rows.
_WEIGHTS_OF_A_CALL = 2e7


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of an experiment, ready to run: what trains, on whose data, under which privacy.

    Attributes:
      clients: the client dataset.
      algorithm: what trains.
      hparams: by name, one value for each client in the order of `clients.client_ids`; without `prox_weight` where it
        is set during training.
      model: what is trained.
      plan: the privacy plan.
      scalings: by client id, what its features are shifted and scaled by; empty where they are used as they are.
      estimator: how clients estimate gradients.
      process: the TFF computations.
      config_hash: digest of all that decides the training.
      is_weighted: whether silos count by their numbers of examples.
      auto_prox: what lambda is set from during training; None where it is given.
    """

    clients: ClientDataset
    algorithm: Algorithm
    hparams: Mapping[str, np.ndarray]
    model: Model
    plan: PrivacyPlan
    scalings: Mapping[str, FeatureScaling]
    estimator: GradientEstimator
    process: PersonalizedProcess
    config_hash: str
    is_weighted: bool = False
    auto_prox: SiloParameters | None = None

    def client_data(self, split: str) -> ClientValues:
        """Every client's examples of one split, in the order of `clients.client_ids`, padded to a few sizes."""
        loaded = [self.clients.load(client_id, split) for client_id in self.clients.client_ids]
        padded = padded_sizes([len(examples.y) for examples in loaded], self.model)
        rows = [
            collections.OrderedDict(
                x=_pad(self._scaled(client_id, examples.x), size),
                y=_pad(examples.y, size),
                num_examples=np.int32(len(examples.y)),
            )
            for client_id, examples, size in zip(self.clients.client_ids, loaded, padded, strict=True)
        ]
        return ClientValues.from_members(client_data_type(self.model), rows).stack()

    def client_params(
        self,
        run_key: RunKey,
        round_number: int,
        *,
        changed: Mapping[str, np.ndarray] | None = None,
        run: int = 0,
    ) -> ClientValues:
        """What every client is told in one round: mechanism, hyper-parameters, seed.

        Args:
          run_key: the run's secret.
          round_number: from 1.
          changed: hyper-parameters in place of the method's own, `[clients]` by name.
          run: which of the runs that clients repeat in a search; 0 for training.
        """
        client_ids = self.clients.client_ids
        mechanisms = [dataclasses.asdict(self.plan.mechanisms[client_id]) for client_id in client_ids]
        columns = client_params_columns(
            self.algorithm,
            self.estimator,
            mechanism={
                name: np.array([mechanism[name] for mechanism in mechanisms]) for name in self.estimator.mechanism
            },
            hparams={**self.hparams, **(changed or {})},
            seeds=np.stack([run_key.client_seed(round_number, client_id, run) for client_id in client_ids]),
            selection_epsilons=[self.plan.selection_epsilon(client_id, round_number) for client_id in client_ids],
            weights=self._weights(round_number) if self.is_weighted else None,
        )
        params_type = client_params_type(self.algorithm, self.estimator, is_weighted=self.is_weighted)
        return ClientValues.from_columns(params_type, columns)

    def _weights(self, round_number: int) -> np.ndarray:
        """Silos' numbers of examples over their mean, taken over those that take part: float64 `[clients]`."""
        sizes = np.array([self.plan.num_examples[client_id] for client_id in self.clients.client_ids], np.float64)
        present = [self.plan.takes_part(client_id, round_number) for client_id in self.clients.client_ids]
        return sizes / sizes[present].mean() if any(present) else sizes

    def _scaled(self, client_id: str, x: np.ndarray) -> np.ndarray:
        return self.scalings[client_id].apply(x) if self.scalings else x


def build_method(config: ExperimentConfig, name: str) -> Method:
    """Builds one method of an experiment.

    What silos release before training (`tff_pdp.runtime.silo_releases`) is released now, if it has not been.

    Raises:
      ConfigError: the method, model or plan is unknown, or a hyper-parameter is.
      DataError: the client dataset has not been prepared or is damaged.
      BudgetError: a silo's budget cannot be met.
    """
    if name not in config.algorithms:
        raise ConfigError(f"algorithms: {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}")
    build_plan = lookup(PLANS, config.privacy.plan, "privacy.plan")
    lookup(ENGINES, config.training.engine, "training.engine")
    clients = open_clients(config)
    # All of the experiment's methods: a wrong name should not come to light after the first has spent its budget.
    checked = {
        other: build_algorithm(other, given, num_clients=len(clients.client_ids), rounds=config.training.rounds)
        for other, given in config.algorithms.items()
    }
    algorithm, settings = checked[name]
    model = build_model(config)
    search = build_search(config, algorithm, settings, model, clients)
    releases = release_before_training(config, clients)
    hparams = hparam_columns(algorithm, settings, releases.num_examples, config.privacy.batch_size)
    steps = dict(zip(clients.client_ids, hparams["local_steps"].tolist(), strict=True))
    training = PlannedTraining(
        num_examples=releases.num_examples,
        gradients_per_round={client_id: count * algorithm.data_passes for client_id, count in steps.items()},
        rounds=config.training.rounds,
        selection_rounds=algorithm.selection_rounds,
        fixed_events=releases.events,
        num_examples_are_noised=releases.num_examples_are_noised,
        unsound=releases.unsound,
        search=search,
    )
    plan = build_plan(config.privacy, training)
    estimator = build_dp_sgd(model, plan.sampler)
    selector = build_selector(model, config.privacy.selection_loss_bound) if algorithm.candidates else None
    is_weighted = config.training.weighting == "num_examples"
    is_auto = settings.get("prox_weight") == AUTO
    return Method(
        clients=clients,
        algorithm=algorithm,
        hparams=hparams,
        model=model,
        plan=plan,
        scalings=releases.scalings,
        estimator=estimator,
        process=compose(
            algorithm,
            model,
            estimator=estimator,
            selector=selector,
            is_weighted=is_weighted,
            model_seed=config.model.seed,
        ),
        is_weighted=is_weighted,
        auto_prox=_auto_prox(plan, hparams) if is_auto else None,
        config_hash=config.hash(name, _inputs_hash(config, clients, model, releases, plan)),
    )


def padded_sizes(num_examples: Sequence[int], model: Model) -> np.ndarray:
    """The size each client's examples are padded to: int64 `[clients]`."""
    return bucket_sizes(num_examples, rows_of_a_call=_WEIGHTS_OF_A_CALL / model.num_parameters())


@contextlib.contextmanager
def experiment_engine(config: ExperimentConfig, choices: dict[str, Any] | None = None) -> Iterator[Engine]:
    """Builds and installs the experiment's engine.

    Args:
      config: the experiment.
      choices: what `client_parallelism: auto` chose before; added to.

    Raises:
      ConfigError: the engine does not have the option.
      EngineError: the device is absent, or the engine does not start.
    """
    training = config.training
    options: dict[str, Any] = {}
    if training.engine == "native" and training.client_parallelism == "vectorized":
        raise ConfigError("training.client_parallelism: the engine 'native' computes client by client")
    if training.engine == "inprocess":
        options = {
            "client_parallelism": training.client_parallelism,
            "clients_per_call": training.clients_per_call,
            "choices": choices,
        }
    with running_engine(training.engine, training.device, **options) as engine:
        yield engine


def build_model(config: ExperimentConfig) -> Model:
    """Builds the experiment's model.

    Raises:
      ConfigError: the model or one of its arguments is unknown.
    """
    builder = lookup(MODELS, config.model.name, "model.name")
    try:
        return builder(config.data.input_shape, config.data.num_classes, **config.model.arguments)
    except TypeError as error:
        raise ConfigError(f"model.arguments: {error}") from None


def open_clients(config: ExperimentConfig) -> ClientDataset:
    """Opens the experiment's client dataset.

    Raises:
      ConfigError: its examples have another shape or other classes than the experiment's.
      DataError: it has not been prepared or is damaged.
    """
    clients = ClientDataset.open(config.clients_folder)
    features = clients.manifest.features
    expected = (config.data.input_shape, config.data.num_classes)
    if (features.shape, features.num_classes) != expected:
        raise ConfigError(
            f"{config.clients_folder} holds examples of shape {features.shape} in {features.num_classes} classes, but "
            f"data.input_shape and data.num_classes are {expected}: prepare it again with --overwrite"
        )
    return clients


def _pad(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _auto_prox(plan: PrivacyPlan, hparams: Mapping[str, np.ndarray]) -> SiloParameters:
    """What lambda is set from: public parameters of all silos.

    Raises:
      ConfigError: a silo leaves before the last round, or trains without noise.
    """
    if any(last < plan.rounds for last in plan.last_rounds.values()):
        raise ConfigError("prox_weight: auto needs every silo in every round: leave out privacy.noise_multiplier")
    mechanisms = list(plan.mechanisms.values())
    return SiloParameters(
        learning_rate=float(hparams["learning_rate"][0]),
        rounds=plan.rounds,
        local_steps=hparams["local_steps"],
        num_examples=np.array(list(plan.num_examples.values())),
        clip_norm=np.array([mechanism.clip_norm for mechanism in mechanisms]),
        noise_multiplier=np.array([mechanism.noise_multiplier for mechanism in mechanisms]),
        sampling_rate=np.array([mechanism.sampling_rate for mechanism in mechanisms]),
        expected_batch_size=np.array([mechanism.expected_batch_size for mechanism in mechanisms]),
    )


def _inputs_hash(
    config: ExperimentConfig, clients: ClientDataset, model: Model, releases: SiloReleases, plan: PrivacyPlan
) -> str:
    """A digest of what decides training besides the configuration's own text."""
    digest = hashlib.sha256((config.clients_folder / MANIFEST_FILE).read_bytes())
    # What a client draws depends on the size its data are padded to.
    sizes = [clients.num_examples(client_id, "train") for client_id in clients.client_ids]
    digest.update(padded_sizes(sizes, model).tobytes())
    digest.update(releases.digest().encode())
    # They may come from a file.
    digest.update(repr(sorted(plan.budgets.items())).encode())
    return digest.hexdigest()
