"""From an experiment's configuration to the values a run works with."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from beam_pipelines.epidemic.sources import promised_influence
from tff_pdp.algorithms.auto_prox.estimates import SiloParameters
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.engines.running import ENGINES, Engine, running_engine
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.before_training import SiloReleases, release_before_training
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.examples import padded_sizes
from tff_pdp.experiment.hparams import AUTO, build_algorithm, build_search, hparam_columns
from tff_pdp.experiment.method import Method, capped_weights
from tff_pdp.experiment.registry import MODELS, PLANS, lookup
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.feature_scaling import parse_feature_scaling
from tff_pdp.privacy.mechanisms.selection import build_selector
from tff_pdp.privacy.mechanisms.silo_statistics import parse_num_examples
from tff_pdp.privacy.plans.plan import PlannedTraining, PrivacyPlan, check_suits_rows
from tff_pdp.privacy.plans.silo_example import SiloExamplePlan
from tff_pdp.processes.aggregation import UserSum
from tff_pdp.processes.client_work import initial_weights, num_released
from tff_pdp.processes.compose import PersonalizedProcess, compose

_COUNTS_ARE_PUBLIC = "the number of examples of each user is treated as public and fixed"

Computations = dict[Hashable, PersonalizedProcess]
_kept: ContextVar[Computations | None] = ContextVar("kept computations", default=None)


def build_method(config: ExperimentConfig, name: str) -> Method:
    """Builds one method of an experiment.

    What silos release before training (`tff_pdp.experiment.before_training`) is released now, if it has not been.

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
    model = build_model(config)
    from_experiment = {"num_clients": len(clients.client_ids), "rounds": config.training.rounds, "head": model.head}
    # All of the experiment's methods: a wrong name should not come to light after the first has spent its budget.
    checked = {other: build_algorithm(other, given, **from_experiment) for other, given in config.algorithms.items()}
    algorithm, settings = checked[name]
    # Before silos release anything.
    _check_for_rows(config, clients)
    if config.privacy.plan == "user" or config.privacy.users_per_round is not None:
        _check_for_users(algorithm, config)
    else:
        _check_for_silos(algorithm, config.training.weighting)
    search = build_search(config, algorithm, settings, model, clients)
    releases = release_before_training(config, clients)
    hparams = hparam_columns(algorithm, settings, releases.num_examples, config.privacy.batch_size)
    steps = dict(zip(clients.client_ids, algorithm.num_gradients(hparams).tolist(), strict=True))
    weighting, cap = config.training.weighting, config.training.weight_cap
    is_capped = weighting == "paper_capped_num_examples"
    training = PlannedTraining(
        num_examples=releases.num_examples,
        gradients_per_round=steps,
        rounds=config.training.rounds,
        selection_rounds=algorithm.selection_rounds,
        fixed_events=releases.events,
        num_examples_are_noised=releases.num_examples_are_noised,
        unsound=algorithm.unsound or releases.unsound,
        condition="; ".join(filter(None, [algorithm.condition, _COUNTS_ARE_PUBLIC if is_capped else ""])),
        num_parameters=model.num_parameters(),
        num_released=num_released(algorithm, model),
        num_noised=algorithm.noised_size(initial_weights(model)) if algorithm.noised_size else None,
        noise_on_own_support=algorithm.noise_on_own_support,
        total_weight=float(capped_weights(_sizes(releases), cap).sum()) if is_capped else None,
        search=search,
        row_influence=promised_influence(clients.manifest),
    )
    plan = build_plan(config.privacy, training)
    is_auto = settings.get("prox_weight") == AUTO
    if isinstance(plan, SiloExamplePlan):
        user_sum, estimator = None, build_dp_sgd(model, plan.sampler, plan.generator)
    else:
        user_sum = UserSum(plan.noise, plan.mechanism.sampling_rate, plan.generator)
        estimator = build_minibatch(model, config.privacy.batch_size)
    loss_bound = config.privacy.selection_loss_bound
    selector = build_selector(model, loss_bound, plan.generator) if algorithm.candidates else None
    is_weighted = weighting != "uniform"
    return Method(
        clients=clients,
        algorithm=algorithm,
        hparams=hparams,
        model=model,
        plan=plan,
        scalings=releases.scalings,
        estimator=estimator,
        process=_kept_or_composed(
            computations_key(config, algorithm, len(clients.client_ids), user_sum),
            lambda: compose(
                algorithm,
                model,
                estimator=estimator,
                selector=selector,
                is_weighted=is_weighted,
                user_sum=user_sum,
                model_seed=config.model.seed,
            ),
        ),
        num_examples=releases.num_examples,
        weight_cap=cap,
        is_weighted=is_weighted,
        auto_prox=_auto_prox(plan, hparams) if is_auto and isinstance(plan, SiloExamplePlan) else None,
        config_hash=config.hash(name, _inputs_hash(config, clients, model, releases, plan)),
    )


@contextlib.contextmanager
def keep_computations(kept: Computations) -> Iterator[None]:
    """Shares TFF computations among the methods built inside of the `with` that have equal ones.

    What an engine has traced and compiled of a computation then serves all of these methods.

    Args:
      kept: computations so far, by `computations_key`; added to.
    """
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def computations_key(
    config: ExperimentConfig, algorithm: Algorithm, num_clients: int, user_sum: UserSum | None
) -> Hashable:
    """Names the TFF computations of a method: hyper-parameters, noise, data and seeds are arguments of them.

    Args:
      config: the experiment, with settings for this algorithm.
      algorithm: of the method.
      num_clients: of the data set.
      user_sum: of the method; None where silos are protected.
    """
    content = config.to_dict()
    settings = content["algorithms"][algorithm.name]
    decisive = {
        "algorithm": algorithm.name,
        "settings": {name: value for name, value in settings.items() if name not in algorithm.hparams},
        "model": content["model"],
        "features": [content["data"]["input_shape"], content["data"]["num_classes"], num_clients],
        "privacy": [content["privacy"][name] for name in ("sampler", "selection_loss_bound", "generator")],
        "rounds": content["training"]["rounds"],
        "weighting": content["training"]["weighting"],
        # Clip norm, noise and expected cohort are in the server's state.
        "users": user_sum and [repr(user_sum), content["privacy"]["batch_size"]],
    }
    return json.dumps(decisive, sort_keys=True)


def _kept_or_composed(key: Hashable, build: Callable[[], PersonalizedProcess]) -> PersonalizedProcess:
    kept = _kept.get()
    if kept is None:
        return build()
    if key not in kept:
        kept[key] = build()
    return kept[key]


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
        if engine.device != "cpu" and training.deterministic_operations and config.privacy.plan != "none":
            tf.config.experimental.enable_op_determinism()
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


def _sizes(releases: SiloReleases) -> np.ndarray:
    return np.array(list(releases.num_examples.values()), np.float64)


def _check_for_rows(config: ExperimentConfig, clients: ClientDataset) -> None:
    """Raises a ConfigError where a plan does not protect what rows are made of, or a release is for single rows."""
    check_suits_rows(config.privacy.plan, promised_influence(clients.manifest))
    if config.privacy.plan == "contact_graph" and _releases_statistics(config):
        raise ConfigError(
            "privacy.num_examples and privacy.feature_scaling may release nothing under privacy.plan contact_graph: "
            "their noise is for one row, and a person is in several. Use public forms"
        )


def _releases_statistics(config: ExperimentConfig) -> bool:
    """Whether clients release something with noise before training."""
    scaling = parse_feature_scaling(config.privacy.feature_scaling, config.data.input_shape)
    return parse_num_examples(config.privacy.num_examples) is not None or scaling.moments is not None


def _check_for_silos(algorithm: Algorithm, weighting: str) -> None:
    """Raises a ConfigError where a method or weighting is for users."""
    if algorithm.adapt is not None:
        raise ConfigError(
            f"algorithms.{algorithm.name} adapts to a client's examples without noise before its model is used, which "
            "does not protect these examples: it is for users, by privacy.plan user, or none with users_per_round"
        )
    if weighting == "paper_capped_num_examples":
        raise ConfigError(f"training.weighting {weighting!r} is for users; silos have uniform and num_examples")


def _check_for_users(algorithm: Algorithm, config: ExperimentConfig) -> None:
    """Raises a ConfigError where a method, weighting or release is for silos."""
    if _releases_statistics(config):
        raise ConfigError(
            "privacy.num_examples and privacy.feature_scaling may release nothing of single users: use public forms"
        )
    if set(algorithm.released.values()) - {"mean"} or algorithm.candidates is not None:
        raise ConfigError(
            f"algorithms.{algorithm.name} selects clusters or releases values of single clients: it is for silos"
        )
    if algorithm.needs_everyone:
        raise ConfigError(
            f"algorithms.{algorithm.name} needs every client in every round: it is for silos. Methods for users share "
            "a part of the model, or tune it before it is used, such as centaur, udp_hypernet and dp_fed_avg_ft"
        )
    if config.training.weighting == "num_examples":
        raise ConfigError(
            "training.weighting num_examples is for silos: users count the same, or as paper_capped_num_examples"
        )


def _auto_prox(plan: SiloExamplePlan, hparams: Mapping[str, np.ndarray]) -> SiloParameters:
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
