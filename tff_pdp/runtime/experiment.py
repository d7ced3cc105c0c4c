"""From an experiment's configuration to the values a run works with."""

import collections
import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.config import ExperimentConfig
from tff_pdp.data.buckets import bucket_sizes
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.privacy.dp_sgd import build_dp_sgd
from tff_pdp.privacy.plan import PrivacyPlan
from tff_pdp.processes.compose import PersonalizedProcess, client_data_type, client_params_type, compose
from tff_pdp.registry import ALGORITHMS, MODELS, PLANS
from tff_pdp.runtime.client_values import ClientValues
from tff_pdp.runtime.engines import ENGINES, Engine, running_engine
from tff_pdp.runtime.run_key import RunKey

# A call over stacked clients takes about as long, before it computes anything, as so many weights times rows.
_WEIGHTS_OF_A_CALL = 2e7


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of an experiment, ready to run: what trains, on whose data, under which privacy."""

    clients: ClientDataset
    algorithm: Algorithm
    hparams: Mapping[str, float | int]
    model: Model
    plan: PrivacyPlan
    estimator: GradientEstimator
    process: PersonalizedProcess
    config_hash: str

    def client_data(self, split: str) -> ClientValues:
        """Every client's examples of one split, in the order of `clients.client_ids`, padded to a few sizes."""
        loaded = [self.clients.load(client_id, split) for client_id in self.clients.client_ids]
        padded = padded_sizes([len(examples.y) for examples in loaded], self.model)
        rows = [
            collections.OrderedDict(
                x=_pad(examples.x, size), y=_pad(examples.y, size), num_examples=np.int32(len(examples.y))
            )
            for examples, size in zip(loaded, padded, strict=True)
        ]
        return ClientValues.from_members(client_data_type(self.model), rows).stack()

    def client_params(self, run_key: RunKey, round_number: int) -> ClientValues:
        """Every client's mechanism, hyper-parameters and seed for one round."""
        client_ids = self.clients.client_ids
        mechanisms = [dataclasses.asdict(self.plan.mechanisms[client_id]) for client_id in client_ids]
        columns = collections.OrderedDict(
            mechanism=collections.OrderedDict(
                (name, np.array([mechanism[name] for mechanism in mechanisms], np.float32))
                for name in self.estimator.mechanism
            ),
            hparams=collections.OrderedDict(
                (
                    name,
                    np.full(len(client_ids), self.hparams[name], np.int32 if isinstance(default, int) else np.float32),
                )
                for name, default in self.algorithm.hparams.items()
            ),
            seed=np.stack([run_key.client_seed(round_number, client_id) for client_id in client_ids]),
        )
        return ClientValues.from_columns(client_params_type(self.algorithm, self.estimator), columns)


def build_method(config: ExperimentConfig, name: str) -> Method:
    """Builds one method of an experiment.

    Raises:
      ConfigError: the method, model or plan is unknown, or a hyper-parameter is.
      DataError: the client dataset has not been prepared or is damaged.
      BudgetError: a silo's budget cannot be met.
    """
    if name not in config.algorithms:
        raise ConfigError(f"algorithms: {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}")
    # All of the experiment's methods: a wrong name should not come to light after the first has spent its budget.
    checked = {other: _algorithm(other, given) for other, given in config.algorithms.items()}
    algorithm, hparams = checked[name]
    lookup(ENGINES, config.training.engine, "training.engine")
    clients = _open_clients(config)
    model = build_model(config)
    num_examples = {client_id: clients.num_examples(client_id, "train") for client_id in clients.client_ids}
    plan = lookup(PLANS, config.privacy.plan, "privacy.plan")(
        config.privacy,
        num_examples,
        gradients_per_round=int(hparams["local_steps"]) * algorithm.data_passes,
        rounds=config.training.rounds,
    )
    estimator = build_dp_sgd(model)
    data_hash = hashlib.sha256((config.clients_folder / MANIFEST_FILE).read_bytes())
    # What a client draws depends on the size its data are padded to.
    data_hash.update(padded_sizes(list(num_examples.values()), model).tobytes())
    return Method(
        clients=clients,
        algorithm=algorithm,
        hparams=hparams,
        model=model,
        plan=plan,
        estimator=estimator,
        process=compose(algorithm, model, estimator=estimator, model_seed=config.model.seed),
        config_hash=config.hash(name, data_hash.hexdigest()),
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
        return builder(config.data.image_shape, config.data.num_classes, **config.model.arguments)
    except TypeError as error:
        raise ConfigError(f"model.arguments: {error}") from None


def lookup(registry: Mapping[str, Any], name: str, key: str) -> Any:
    """Returns a registered builder.

    Raises:
      ConfigError: the name is not registered; the message lists those that are.
    """
    if name not in registry:
        raise ConfigError(f"{key}: {name!r} is not known; known: {', '.join(sorted(registry))}")
    return registry[name]


def _open_clients(config: ExperimentConfig) -> ClientDataset:
    clients = ClientDataset.open(config.clients_folder)
    features = clients.manifest.features
    expected = (config.data.image_shape, config.data.num_classes)
    if (features.shape, features.num_classes) != expected:
        raise ConfigError(
            f"{config.clients_folder} holds examples of shape {features.shape} in {features.num_classes} classes, but "
            f"data.image_shape and data.num_classes are {expected}: prepare it again with --overwrite"
        )
    return clients


def _pad(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _algorithm(name: str, given: Mapping[str, Any]) -> tuple[Algorithm, Mapping[str, float | int]]:
    """Builds an algorithm and completes its hyper-parameters."""
    algorithm = lookup(ALGORITHMS, name, "algorithms")()
    for hparam, value in given.items():
        key = f"algorithms.{name}.{hparam}"
        if hparam not in algorithm.hparams:
            raise ConfigError(f"unknown key {key!r}; {name} has: {', '.join(algorithm.hparams)}")
        wanted = int if isinstance(algorithm.hparams[hparam], int) else (int, float)
        lowest = 1 if hparam == "local_steps" else 0
        if isinstance(value, bool) or not isinstance(value, wanted) or not lowest <= value < math.inf:
            raise ConfigError(f"{key!r} must be a finite number of at least {lowest}, not {value!r}")
    return algorithm, {**algorithm.hparams, **given}
