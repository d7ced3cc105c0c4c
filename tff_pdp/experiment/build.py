"""Builds an experiment's model, methods, engine and clients from the configuration."""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import numpy as np

from beam_pipelines.epidemic.sources import promised_influence
from tff_pdp.algorithms.base import Algorithm, GradientEstimator
from tff_pdp.algorithms.hyper_parameters import AUTO
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.algorithms.phases import ADAPTATION, Phases, in_phases
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import MANIFEST_FILE, Manifest
from tff_pdp.engines.devices import are_operations_deterministic, gpus, use_deterministic_operations
from tff_pdp.engines.ray_workers.calls import PoolOptions
from tff_pdp.engines.running import Engine, running_engine
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.at_workers import DIRECTORY, MethodHost, at_workers
from tff_pdp.experiment.before_training import SiloReleases, plan_releases, release_before_training
from tff_pdp.experiment.config import ExperimentConfig, Training
from tff_pdp.experiment.examples import padded_sizes
from tff_pdp.experiment.hparams import build_algorithm, build_search, hparam_columns
from tff_pdp.experiment.kinds import MODELS
from tff_pdp.experiment.method import Method
from tff_pdp.kinds import settings_of
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.selection import build_selector
from tff_pdp.privacy.mechanisms.user_noise import UserSum
from tff_pdp.privacy.plans.plan import BY_BUDGET, PlannedTraining, PrivacyPlan
from tff_pdp.privacy.plans.user import capped_weights
from tff_pdp.processes.client_work import initial_weights, num_released
from tff_pdp.processes.compose import PersonalizedProcess, compose
from tff_pdp.settings import CountOrZero, read_settings

# Arguments of a model's function besides its settings.
SHAPES = ("input_shape", "num_classes")
# Largest difference of budgets in a softmax, in temperatures: weights are float32, which end at exp(-87).
_MOST_TEMPERATURES = 80.0
_COUNTS_ARE_PUBLIC = "the number of examples of each user is treated as public and fixed"

Computations = dict[Hashable, PersonalizedProcess]
_kept: ContextVar[Computations] = ContextVar("kept computations")


class _OfSizes(NamedTuple):
    """The parts of a method that follow from silos' numbers of examples."""

    hparams: dict[str, np.ndarray]
    plan: PrivacyPlan
    amounts: Mapping[str, float] | None


def build_methods(
    config: ExperimentConfig, num_clients: int
) -> tuple[Model, dict[str, tuple[Algorithm, dict[str, Any]]]]:
    """Builds the model and, by name, all methods with their hyper-parameters; checks all settings.

    Raises:
      ConfigError: a method, the model or a hyper-parameter is unknown, or a value is out of range.
    """
    model = build_model(config)
    methods = {
        name: build_algorithm(
            name,
            settings,
            num_clients=num_clients,
            num_weights=model.num_parameters(),
            rounds=config.federated_rounds,
            head=model.head,
            further=ADAPTATION if config.privacy.synthetic else None,
        )
        for name, settings in config.algorithms.items()
    }
    return model, methods


def build_method(
    config: ExperimentConfig, name: str, *, clients: ClientDataset | None = None, releases: SiloReleases | None = None
) -> Method:
    """Builds one method of an experiment.

    Also makes silos' releases before training (`tff_pdp.experiment.before_training`), if none are stored.

    Args:
      config: the experiment.
      name: name of the method in the experiment.
      clients: the client dataset; by default the dataset in the experiment's folder.
      releases: what silos have released before training; by default the stored releases, or new ones.

    Raises:
      ConfigError: the method, the model or a hyper-parameter is unknown, or does not suit the plan.
      DataError: the client dataset has not been prepared or is damaged.
      BudgetError: a silo's budget cannot be met.
    """
    if name not in config.algorithms:
        raise ConfigError(f"algorithms: {name!r} is not in this experiment, which has: {', '.join(config.algorithms)}")
    choose_operations(config)
    clients, privacy = clients or open_clients(config), config.privacy
    # All of the experiment's methods: a wrong name should not come to light after the first has spent its budget.
    model, methods = build_methods(config, len(clients.client_ids))
    algorithm, settings = methods[name]
    # Before silos release anything.
    row_influence = promised_influence(clients.manifest)
    privacy.check_rows(row_influence)
    privacy.check(algorithm, config.training.weighting)
    search = build_search(config, algorithm, settings, model, clients)
    phases = _phases(config, algorithm, settings, len(clients.client_ids))
    # The algorithm that reads clients' records.
    own = algorithm if phases is None else phases.adaptation
    planned = plan_releases(config, clients)
    weighting, cap = config.training.weighting, config.training.weight_cap
    is_capped = weighting == "paper_capped_num_examples"
    conditions = [algorithm.claims.condition, _COUNTS_ARE_PUBLIC if is_capped else ""]
    if algorithm.public:
        conditions.append(f"silos' {', '.join(algorithm.public)}, whose mean the server is told, are treated as public")
    if planned.data and planned.data.generator.claim[0] == "formal-conditional":
        conditions.append(f"synthetic data: {planned.data.generator.claim[1]}")
    conditions += [
        f"{section} is defined outside of tff_pdp ({origin})" for section, origin in config.outside(name).items()
    ]

    def of_sizes(num_examples: Mapping[str, int]) -> _OfSizes:
        hparams = hparam_columns(own, settings, num_examples, privacy.batch_size)
        sizes = np.array(list(num_examples.values()), np.float64)
        plan = privacy.build(
            PlannedTraining(
                num_examples=num_examples,
                gradients_per_round=dict(zip(clients.client_ids, own.num_gradients(hparams).tolist(), strict=True)),
                rounds=config.training.rounds,
                selection_rounds=own.selection_rounds,
                fixed_events=planned.events,
                num_examples_are_noised=planned.num_examples is None,
                unsound=algorithm.claims.unsound or planned.unsound,
                condition="; ".join(filter(None, conditions)),
                num_parameters=model.num_parameters(),
                num_released=num_released(algorithm, model),
                num_noised=algorithm.claims.noised_size and algorithm.claims.noised_size(initial_weights(model)),
                noise_on_own_support=algorithm.claims.noise_on_own_support,
                total_weight=float(capped_weights(sizes, cap).sum()) if is_capped else None,
                search=search,
                synthetic_rounds=privacy.synthetic.rounds if privacy.synthetic else 0,
                row_influence=row_influence,
            )
        )
        return _OfSizes(hparams, plan, _amounts(config.training, num_examples, plan))

    # A plan that is refused must not have cost a release.
    early = None if planned.num_examples is None else of_sizes(planned.num_examples)
    releases = releases or release_before_training(config, clients, planned)
    hparams, plan, amounts = early or of_sizes(releases.num_examples)
    is_plain = own.needs_plain_gradients and not privacy.is_private
    estimator = build_minibatch(model, privacy.batch_size) if is_plain else plan.estimator(model)
    selector = build_selector(model, privacy.selection_loss_bound, plan.generator) if algorithm.candidates else None

    def process_of(one: Algorithm, estimator: GradientEstimator, phase: str = "") -> PersonalizedProcess:
        return _kept_or_composed(
            computations_key(config, algorithm, len(clients.client_ids), plan.server_sum(), phase),
            lambda: compose(
                one,
                model,
                estimator=estimator,
                selector=selector,
                is_weighted=amounts is not None,
                user_sum=plan.server_sum(),
                model_seed=model_seed(config),
            ),
        )

    method = Method(
        clients=clients,
        algorithm=own,
        hparams=hparams,
        model=model,
        plan=plan,
        scalings=releases.scalings,
        estimator=estimator,
        process=process_of(own, estimator, "adaptation" if phases else ""),
        amounts=amounts,
        weight_cap=cap,
        hook=algorithm.hook(plan.public_parameters(hparams), model.num_parameters())
        if algorithm.hook and AUTO in settings.values()
        else None,
        config_hash=config.hash(name, _inputs_hash(config, clients, model, releases, plan)),
    )
    if phases is None or privacy.synthetic is None or releases.synthetic is None:
        return at_workers(method, config, name, releases, build_method) if config.training.workers else method
    # Synthetic data were released before: batches of them need neither clip nor noise.
    plain = build_minibatch(model, privacy.batch_size)
    sizes_of_synthetic = {client_id: releases.synthetic.num_examples(client_id) for client_id in clients.client_ids}
    first = dataclasses.replace(
        method,
        algorithm=phases.federated,
        hparams=hparam_columns(phases.federated, settings, sizes_of_synthetic, privacy.batch_size),
        estimator=plain,
        process=process_of(phases.federated, plain, f"synthetic, batches of {privacy.batch_size}"),
        source=releases.synthetic,
    )
    both = dataclasses.replace(method, first_phase=first, first_rounds=privacy.synthetic.rounds)
    return at_workers(both, config, name, releases, build_method) if config.training.workers else both


def _phases(
    config: ExperimentConfig, algorithm: Algorithm, settings: Mapping[str, Any], num_clients: int
) -> Phases | None:
    """Returns both phases of a method that trains on synthetic data first; None for a training in one phase."""
    section, rounds = config.privacy.synthetic, config.training.rounds
    if section is None:
        return None
    if section.rounds >= rounds:
        raise ConfigError(
            f"privacy.synthetic.rounds is {section.rounds}, and must be below training.rounds, which is {rounds}: in "
            "the rounds after it, silos adapt models to their records"
        )
    if config.tuning.search_for(algorithm.name):
        raise ConfigError("tuning.search repeats trainings on records: leave out privacy.synthetic, or the search")
    if automatic := [name for name, value in settings.items() if value == AUTO]:
        raise ConfigError(
            f"algorithms.{algorithm.name}.{automatic[0]} is {AUTO!r}, which is computed from the noise of DP-SGD, and "
            "rounds on synthetic data have none: give a number instead"
        )
    return in_phases(algorithm, federated_rounds=section.rounds, num_clients=num_clients)


def _amounts(training: Training, num_examples: Mapping[str, int], plan: PrivacyPlan) -> Mapping[str, float] | None:
    """Returns what clients count by in means, by client id; None if all count the same."""
    weighting = training.weighting
    if weighting not in BY_BUDGET:
        return None if weighting == "uniform" else num_examples
    epsilons = {client_id: plan.budgets[plan.scope_of(client_id)].epsilon for client_id in num_examples}
    largest = max(epsilons.values())
    if math.isinf(largest):
        infinite = [client_id for client_id, epsilon in epsilons.items() if math.isinf(epsilon)]
        raise ConfigError(
            f"training.weighting {weighting!r} needs finite budgets, and that of {len(infinite)} silos, for example "
            f"{infinite[0]!r}, is infinite: set finite epsilons, or another weighting"
        )
    # Equal budgets are exactly one, so that weights are.
    if weighting == "budget":
        return {client_id: epsilon / largest for client_id, epsilon in epsilons.items()}
    temperature, least = training.softmax_temperature, min(epsilons.values())
    if (largest - least) / temperature > _MOST_TEMPERATURES:
        raise ConfigError(
            f"training.weighting 'budget_softmax': budgets from {least:g} to {largest:g} are too far apart for "
            f"training.softmax_temperature {temperature:g}, with which silos with small budgets would have no weight. "
            f"Raise the temperature to at least {math.ceil((largest - least) / _MOST_TEMPERATURES)}"
        )
    return {client_id: math.exp((epsilon - largest) / temperature) for client_id, epsilon in epsilons.items()}


@contextlib.contextmanager
def keep_computations(kept: Computations) -> Iterator[None]:
    """Shares equal TFF computations among methods built inside the `with` block, so that an engine compiles them once.

    `kept` maps keys from `computations_key` to earlier computations; computations of further methods are added.
    """
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def computations_key(
    config: ExperimentConfig, algorithm: Algorithm, num_clients: int, user_sum: UserSum | None, phase: str = ""
) -> Hashable:
    """Returns a key that methods with equal TFF computations share.

    Values of hyper-parameters, amounts of noise, examples and the run's seeds have no effect on the key. `config` must
    contain settings for `algorithm`. `user_sum` is the plan's `server_sum`. `phase` is the name of a phase, for
    trainings in two phases.
    """
    content = config.to_dict()
    settings, privacy = content["algorithms"][algorithm.name], config.privacy
    decisive = {
        "algorithm": config.kind_of(algorithm.name),
        "settings": {
            name: value for name, value in settings.items() if name not in {**algorithm.hparams, **ADAPTATION}
        },
        "phase": phase,
        "model": content["model"],
        "features": [*data_shapes(config), num_clients],
        "privacy": [privacy.sampler, privacy.selection_loss_bound, privacy.generator],
        "rounds": [content["training"]["rounds"], config.federated_rounds],
        "weighting": content["training"]["weighting"],
        # Clip norm, noise and expected cohort are in the server's state.
        "users": user_sum and [repr(user_sum), privacy.batch_size],
        "batches of plain gradients": algorithm.needs_plain_gradients and privacy.batch_size,
        # Tracing chooses operations.
        "deterministic": are_operations_deterministic(),
    }
    return json.dumps(decisive, sort_keys=True)


def _kept_or_composed(key: Hashable, build: Callable[[], PersonalizedProcess]) -> PersonalizedProcess:
    kept = _kept.get({})
    if key not in kept:
        kept[key] = build()
    return kept[key]


@contextlib.contextmanager
def experiment_engine(config: ExperimentConfig, choices: dict[str, Any] | None = None) -> Iterator[Engine]:
    """Builds and installs the experiment's engine.

    `choices` contains the earlier choices of `client_parallelism: auto`, which are used again; new choices are added.

    Raises:
      ConfigError: the engine does not have an option that is set.
      EngineError: the device is absent, or the engine does not start.
    """
    training = config.training
    options: dict[str, Any] = {}
    if training.engine == "inprocess":
        options = {
            "client_parallelism": training.client_parallelism,
            "clients_per_call": training.clients_per_call,
            "xla": config.xla,
            "choices": choices,
        }
    workers = training.workers
    if workers is not None:
        places = PoolOptions(workers.address, workers.num_workers, workers.cpus_per_worker, workers.gpus_per_worker)
        # Workers do without XLA (`ExperimentConfig.xla`).
        del options["xla"]
        options |= {"build_host": MethodHost, "directory": DIRECTORY, "options": places}
    choose_operations(config)
    with running_engine("ray" if workers else training.engine, training.device, **options) as engine:
        yield engine


def choose_operations(config: ExperimentConfig) -> None:
    """Makes operations deterministic if the experiment adds noise, may use a GPU here, and does not forbid it.

    Called before computations are traced, and before an engine takes the GPU: TensorFlow's functions choose operations
    while they are traced, and kernels that are built keep their order of additions.
    """
    training = config.training
    workers = training.workers
    if workers is not None:
        may_take_gpu = workers.gpus_per_worker > 0
    else:
        may_take_gpu = training.engine == "inprocess" and training.device != "cpu" and bool(gpus())
    if may_take_gpu and training.deterministic_operations and config.privacy.is_private:
        use_deterministic_operations()


def build_model(config: ExperimentConfig) -> Model:
    """Builds the experiment's model.

    Raises:
      ConfigError: the kind or one of its settings is unknown, or out of range.
    """
    given = dict(config.model)
    kind = given.pop("kind", None)
    given.pop("seed", None)
    model_seed(config)
    if not isinstance(kind, str):
        raise ConfigError(f"missing key model.kind: one of {', '.join(MODELS.own)}, or module:name")
    builder = MODELS.find(kind)
    settings = read_settings(settings_of(builder, SHAPES), given, "the experiment", "model")
    return builder(*data_shapes(config), **msgspec.structs.asdict(settings))


def data_shapes(config: ExperimentConfig) -> tuple[tuple[int, ...], int]:
    """Returns the shape of an example and the number of classes: the settings' or, if these leave it open, the data's.

    Raises:
      DataError: the settings leave a number open, and the client dataset has not been prepared or is damaged.
    """
    shape, num_classes = config.data.input_shape, config.data.num_classes
    if shape and num_classes is not None:
        return shape, num_classes
    features = Manifest.load(config.clients_folder).features
    return shape or features.shape, features.num_classes if num_classes is None else num_classes


def model_seed(config: ExperimentConfig) -> int:
    """Returns the seed of the model's initial weights, 0 by default.

    Raises:
      ConfigError: the seed is not a whole number of at least 0.
    """
    return read_settings(CountOrZero, config.model.get("seed", 0), "the experiment", "model.seed")


def open_clients(config: ExperimentConfig) -> ClientDataset:
    """Opens the experiment's client dataset.

    Raises:
      ConfigError: the examples' shape or number of classes differs between the dataset and the experiment.
      DataError: the dataset has not been prepared or is damaged.
    """
    clients = ClientDataset.open(config.clients_folder)
    features = clients.manifest.features
    expected = data_shapes(config)
    if (features.shape, features.num_classes) != expected:
        raise ConfigError(
            f"{config.clients_folder} holds examples of shape {features.shape} in {features.num_classes} classes, but "
            f"data.input_shape and data.num_classes are {expected}: prepare the data again with --overwrite"
        )
    return clients


def _inputs_hash(
    config: ExperimentConfig, clients: ClientDataset, model: Model, releases: SiloReleases, plan: PrivacyPlan
) -> str:
    """Returns a digest of all that decides training besides the configuration's own text."""
    digest = hashlib.sha256((clients.path / MANIFEST_FILE).read_bytes())
    # A client's draws depend on the size that its data are padded to.
    digest.update(padded_sizes(clients.sizes("train"), model).tobytes())
    digest.update(releases.digest().encode())
    # Budgets may come from a file.
    digest.update(repr(sorted(plan.budgets.items())).encode())
    return digest.hexdigest()
