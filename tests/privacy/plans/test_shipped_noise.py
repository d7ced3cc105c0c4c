"""What noise on a grid costs in every shipped configuration, and that plans meet their budgets with it."""

import copy
import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from tests.places import CONFIGS
from tests.tiers import parameters
from tff_pdp.algorithms.phases import ADAPTATION, in_phases
from tff_pdp.data.manifest import RowInfluence
from tff_pdp.experiment.config import ExperimentConfig, load_experiment
from tff_pdp.experiment.hparams import build_algorithm, hparam_columns
from tff_pdp.experiment.model import build_model
from tff_pdp.models.base import Model
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent, with_grid_noise
from tff_pdp.privacy.mechanisms.user_noise import TreeNoise
from tff_pdp.privacy.plans.plan import DRAWN_NOISE, PlannedTraining
from tff_pdp.processes.client_work import num_released
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.reproduce.setting import NAMES, read_setting

# What was published of a reproduction lies beside the configurations, and is none.
FILES = {path.stem: path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "published"}
# Clients, and training examples of the largest silo, or more: what epochs have steps by. Users' do not matter.
CLIENTS = {
    "demo": (10, 600),
    "demo_femnist": (200, 400),
    "school": (139, 201),
    "vehicle": (23, 400),
    "rotated_mnist": (40, 1500),
    "cifar10_heterogeneous": (30, 1667),
    "pandemic": (8, 5000),
    "contact_networks": (9, 60),
    "mnist_writers": (539, 100),
    "pfed_dsu_cifar10": (20, 2500),
    "pfed_dsu_emnist": (20, 12000),
    "udp_cifar10": (100, 500),
    "udp_femnist": (3400, 200),
    "pfa_mnist": (50, 6000),
    "pppfl_mnist": (5, 30000),
    "pppfl_fashion": (5, 30000),
}
# A hypernetwork of 12 million weights, which thousands of rounds release, gives up more of delta; that is worth less
# than a thousandth of its epsilon, of ten.
OF_DELTA = {"udp_cifar10": 0.02}


def test_all_shipped_configurations_are_known():
    assert set(FILES) == set(CLIENTS)
    assert set(NAMES) <= set(CLIENTS)


@dataclasses.dataclass(frozen=True)
class Run:
    """One method of a configuration."""

    config: ExperimentConfig
    algorithm: str
    settings: dict
    rounds: int
    num_clients: int
    num_examples: int

    def training(self) -> PlannedTraining:
        """What is planned for, where all clients are as large as the largest."""
        config, model = self.config, _model(self.config)
        algorithm, settings = build_algorithm(
            self.algorithm,
            self.settings,
            num_clients=self.num_clients,
            rounds=self.free_rounds or self.rounds,
            head=model.head,
            further=ADAPTATION if self.free_rounds else None,
        )
        if self.free_rounds:
            phases = in_phases(algorithm, federated_rounds=self.free_rounds, num_clients=self.num_clients)
            algorithm = phases.adaptation
        sizes = dict.fromkeys((f"client {place}" for place in range(self.num_clients)), self.num_examples)
        columns = hparam_columns(algorithm, settings, {"client": self.num_examples}, config.privacy.batch_size)
        return PlannedTraining(
            num_examples=sizes,
            gradients_per_round=dict.fromkeys(sizes, int(np.max(algorithm.num_gradients(columns)))),
            rounds=self.rounds,
            selection_rounds=algorithm.selection_rounds,
            num_parameters=model.num_parameters(),
            num_released=_num_released(self, algorithm) if self.protects_users else 0,
            noise_on_own_support=algorithm.claims.noise_on_own_support,
            row_influence=RowInfluence("node", "replace_special", 11, "at most ten contacts")
            if config.privacy.kind == "contact_graph"
            else None,
            synthetic_rounds=self.free_rounds,
        )

    @property
    def free_rounds(self) -> int:
        """Rounds on synthetic data, which read no records."""
        synthetic = self.config.privacy.synthetic
        return 0 if synthetic is None else synthetic.rounds

    @property
    def protects_users(self) -> bool:
        """In place of examples, or of people in rows."""
        return self.config.privacy.kind == "user"

    def values(self) -> int:
        """How many are drawn, at most: worked out anew."""
        training = self.training()
        if self.protects_users:
            # A round's sum or tree nodes, and a count; rounds may be drawn twice.
            sums = 2 if isinstance(self.config.privacy.user_noise, TreeNoise) else 1
            per_round = sums * (training.num_released + 1) + 2
            return 0 if not training.num_released else 2 * per_round * self.rounds
        steps = max(training.gradients_per_round.values()) * (self.rounds - self.free_rounds)
        return 2 * 2 * math.ceil(training.num_parameters / 2) * steps

    def shares(self) -> tuple[float, float]:
        """Of epsilon and of delta, of the client with the smallest budget, by an epsilon that is roughly known."""
        budgets = self.config.privacy.budgets.assign([f"client {place}" for place in range(8)]).values()
        budget = min(budgets, key=lambda budget: (budget.epsilon, budget.delta))
        parts = ((dp_accounting.GaussianDpEvent(1.0), 1), (GridNoiseDpEvent(self.values()), 1))
        # At half of delta, by Renyi divergences at a few orders.
        rough = 1.2 * budget.epsilon + 0.5
        left, more = with_grid_noise(parts, budget.delta, lambda *_: rough, lambda _, delta: delta)
        return more / budget.epsilon, 1 - left / budget.delta


# Of models by what they are built from, and of numbers of released values by model and method.
_models: dict[str, Model] = {}
_released: dict[str, int] = {}


def _model_key(config):
    return repr((config.model, config.data.input_shape, config.data.num_classes))


def _model(config):
    key = _model_key(config)
    if key not in _models:
        _models[key] = build_model(config)
    return _models[key]


def _num_released(run, algorithm):
    key = repr((_model_key(run.config), run.algorithm, run.settings))
    if key not in _released:
        _released[key] = num_released(algorithm, _model(run.config))
    return _released[key]


def as_shipped(name):
    """The configuration's own methods."""
    config = load_experiment(FILES[name])
    return [
        Run(config, algorithm, dict(settings), config.training.rounds, *CLIENTS[name])
        for algorithm, settings in config.algorithms.items()
    ]


def at_scale(name, scale_name):
    """All methods and variants of a reproduction, at the smallest and the largest epsilon, and at named budgets."""
    setting = read_setting(name)
    scale = setting.scales[scale_name]
    epsilons = sorted(epsilon for epsilon in scale.epsilons if math.isfinite(epsilon))
    budgets = {epsilon: ("privacy.budgets.epsilon", epsilon) for epsilon in (*epsilons[:1], *epsilons[-1:])}
    budgets |= {name: ("privacy.budgets", setting.budgets[name]) for name in scale.budgets}
    for variant in setting.variants:
        if variant.name not in (scale.variants or [variant.name]):
            continue
        for budget, (key, value) in budgets.items():
            overrides = {**scale.overrides, **variant.overrides, key: value}
            rounds = variant.rounds_at(budget) if scale.takes_rounds else None
            for method in scale.methods or setting.methods:
                swept = METHODS[method]
                config = load_experiment(setting.config_file, {**copy.deepcopy(overrides), **swept.overrides})
                given = {**swept.settings, **variant.algorithm_settings.get(swept.algorithm, {})}
                if given.get("prox_weight") == "auto":
                    # As many gradients as of one that is given.
                    given.pop("prox_weight")
                settings = {**config.algorithms[swept.algorithm], **given}
                all_rounds = (rounds or config.training.rounds) + swept.warm_start_rounds
                yield Run(config, swept.algorithm, settings, all_rounds, *CLIENTS[name])


def largest_shares(runs):
    shares = [run.shares() for run in runs if run.values()]
    assert shares
    return tuple(max(column) for column in zip(*shares, strict=True))


@pytest.mark.parametrize("name", FILES)
def test_shipped_configurations_pay_less_than_a_hundredth_for_noise_on_a_grid(name):
    of_epsilon, of_delta = largest_shares(as_shipped(name))
    assert of_epsilon < 0.01
    assert of_delta < 0.01


@pytest.mark.parametrize("scale", ["as they are run", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_reproductions_pay_less_than_a_hundredth(name, scale):
    scale = read_setting(name).default_scale if scale == "as they are run" else scale
    of_epsilon, of_delta = largest_shares(at_scale(name, scale))
    assert of_epsilon < 0.01
    assert of_delta < OF_DELTA.get(name, 0.01)


@pytest.mark.parametrize(
    "name",
    parameters(list(FILES), test=["demo", "school", "pandemic", "pfed_dsu_cifar10"]),
)
def test_shipped_plans_meet_their_budgets_with_it_and_with_hardly_more_noise(name):
    run = max(as_shipped(name), key=Run.values)
    training = run.training()
    client = next(iter(training.num_examples))
    if run.protects_users:
        planned = training
    else:
        # One silo: all are alike.
        planned = dataclasses.replace(
            training,
            num_examples={client: run.num_examples},
            gradients_per_round={client: training.gradients_per_round[client]},
        )
    # What is released of features or counts is not the matter here.
    plan = run.config.privacy.build(planned)
    ((scope, budget),) = plan.budgets.items()
    assert plan.drawn_noise == {scope: GridNoiseDpEvent(run.values())}
    event = plan.training_event(scope)
    together = dp_accounting.ComposedDpEvent([event, *plan.drawn_noise.values()])
    ideal, best = (epsilon_bounds(one, budget.delta, plan.adjacency).best for one in (event, together))
    assert 0.99 * budget.epsilon < ideal < best <= budget.epsilon
    assert best - ideal < 0.01 * budget.epsilon
    ledger = plan.build_ledger()
    assert ledger is not None
    assert [entry.reason for entry in ledger.entries] == [DRAWN_NOISE]
    for number in range(1, plan.rounds + 1):
        plan.charge_round(ledger, number)
    assert ledger.epsilon(scope).best == pytest.approx(best, rel=1e-9)
    assert ledger.epsilon(scope).best <= budget.epsilon
