"""What new silos pay: noise by an independent calibration, and the record that further fits add to."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from msgspec.structs import replace

from tests.places import DEMO
from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.errors import BudgetError, ConfigError, DataError
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.personal_models.new_clients.costs import plan_gradients, plan_selection, put_on_record
from tff_pdp.personal_models.new_clients.examples import NewClients
from tff_pdp.privacy.accounting.accountants import epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.budgets import OneForAll, SiloBudget
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent
from tff_pdp.privacy.mechanisms.silo_statistics import NoisedNumber
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.registry.entries import Registry
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record.releases import EARLIER, all_releases

CONFIG = SiloExample(kind="silo_example", batch_size=32, clip_norm=0.5, budgets=OneForAll(epsilon=8.0, delta=1e-3))
# Of a fit.
OPTIONS = {"batch_size": 32, "clip_norm": 0.5}
BUDGET = SiloBudget(2.0, 1e-4)
SIZES = {"a": 320, "b": 3200}
# Steps of sampling rates.
GRID = 2**-23
# How close dp_accounting's search comes to the noise that it looks for: it may return what lies one step above.
SEARCHED = 2e-4
# Relative, of the noise that is planned with: its logarithm is found to 1e-5, and the float32 above is taken. A grid of
# losses as wide as 1e-3 adds at most 1e-3^2 / 4 to each step's variance, over 50 steps below 1e-4 of the whole loss's:
# an epsilon of 2 at a delta of 1e-4 goes with a variance of some (2 / 3.7)^2.
PLANNED = 1e-4


def events(sampling_rate, noise_multiplier, steps):
    step = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def test_the_noise_is_what_dp_accounting_asks_for():
    plan, ledger = plan_gradients(CONFIG, BUDGET, 50, SIZES, 100, **OPTIONS)
    for client_id, rate in {"a": 0.1, "b": 0.01}.items():
        mechanism = plan.mechanisms[client_id]
        # On the sampler's grid.
        assert mechanism.sampling_rate == pytest.approx(rate, abs=GRID)
        assert mechanism.clip_norm == 0.5
        assert mechanism.expected_batch_size == pytest.approx(32, abs=GRID * SIZES[client_id])
        wanted = dp_accounting.calibrate_dp_mechanism(
            lambda: pld.PLDAccountant(value_discretization_interval=1e-3),
            lambda noise, rate=rate: events(rate, noise, 50),
            BUDGET.epsilon,
            BUDGET.delta,
            dp_accounting.ExplicitBracketInterval(0.5, 5.0),
            tol=SEARCHED / 2,
        )
        assert mechanism.noise_multiplier == pytest.approx(wanted, abs=SEARCHED + PLANNED * wanted)
        # At the noise that is used, on a finer grid: within the budget, and not by much.
        accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
        accountant.compose(events(mechanism.sampling_rate, mechanism.noise_multiplier, 50))
        assert 0.99 * BUDGET.epsilon < accountant.get_epsilon(BUDGET.delta) <= BUDGET.epsilon
        assert ledger.epsilon(client_id).best <= BUDGET.epsilon


def test_noise_and_sampler_of_training_do_not_count():
    config = replace(CONFIG, noise_multiplier=0.1, sampler="paper_shuffled")
    plan, _ = plan_gradients(config, BUDGET, 50, {"a": 320}, 100, **OPTIONS)
    assert plan.mechanisms["a"].noise_multiplier > 0.5
    assert plan.sampler == "poisson"
    assert plan.claim == "formal-conditional"


def test_a_selection_costs_no_more_than_its_epsilon():
    # As a float32, 0.3 is more than 0.3.
    epsilon, ledger = plan_selection(CONFIG, SiloBudget(0.3, 1e-4), {"a": 10})
    assert 0.2999999 < epsilon <= 0.3
    assert ledger.epsilon("a").best <= 0.3


@pytest.mark.parametrize("plan", [lambda *a: plan_gradients(a[0], a[1], 5, a[2], 100, **OPTIONS), plan_selection])
def test_it_refuses_secret_numbers_and_a_delta_that_means_nothing(plan):
    with pytest.raises(ConfigError, match="not public"):
        plan(replace(CONFIG, num_examples=NoisedNumber(epsilon=0.1)), BUDGET, {"a": 100})
    with pytest.raises(ConfigError, match="silo 'a' is not below 1 / 10000"):
        plan(CONFIG, BUDGET, {"a": 10_000})


def test_no_noise_meets_a_tiny_budget():
    with pytest.raises(BudgetError, match="silo 'a'"):
        plan_gradients(CONFIG, SiloBudget(1e-9, 1e-9), 100_000, {"a": 32}, 100, **OPTIONS)


def put(output, ledger):
    """Enters a fit of silos with one example each, by which nothing is told: in one folder, names decide."""
    config = load_experiment(DEMO, {"output": str(output)})
    examples = [ClientExamples(np.full((1, 8, 8, 1), number), np.zeros(1)) for number, _ in enumerate(ledger.budgets)]
    return put_on_record(config, NewClients(list(ledger.budgets), examples, []), ledger)


def test_fits_on_record_add_up(tmp_path):
    plan, ledger = plan_gradients(CONFIG, BUDGET, 50, {"a": 320, "b": 640}, 100, **OPTIONS)
    once = put(tmp_path, ledger)
    assert (once["a"].epsilon, once["a"].delta, once["a"].releases) == (ledger.epsilon("a").best, 1e-4, 1)
    again, second = plan_gradients(CONFIG, SiloBudget(3.0, 2e-5), 20, {"a": 320}, 100, **OPTIONS)
    both = put(tmp_path, second)
    rate = plan.mechanisms["a"].sampling_rate
    together = dp_accounting.ComposedDpEvent(
        [
            poisson_gaussian_event(rate, plan.mechanisms["a"].noise_multiplier, 50),
            poisson_gaussian_event(rate, again.mechanisms["a"].noise_multiplier, 20),
            # Noise of 100 weights in all steps, drawn twice at most.
            GridNoiseDpEvent(2 * 100 * 50),
            GridNoiseDpEvent(2 * 100 * 20),
        ]
    )
    assert both["a"].epsilon == epsilon_bounds(together, 1e-4).best
    assert max(2.0, 3.0) < both["a"].epsilon < 2.0 + 3.0
    assert (both["a"].delta, both["a"].releases) == (1e-4, 2)
    assert both.keys() == {"a"}
    # Where `tff-pdp evaluate` looks for what was ever spent.
    assert [sorted(release.ledger.budgets) for release in all_releases(tmp_path)] == [["a", "b"], ["a"]]


def test_of_two_fits_that_begin_at_once_one_counts_the_other(tmp_path, monkeypatch):
    _, ledger = plan_selection(CONFIG, BUDGET, {"a": 320})
    begin, inner = Registry.begin, []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()

    def begin_both(registry, *arguments, **named):
        if not inner:
            inner.append(None)
            inner[0] = put(tmp_path / "other", ledger)
        begin(registry, *arguments, **named)

    monkeypatch.setattr(Registry, "begin", begin_both)
    outer = put(tmp_path / "one", ledger)
    assert sorted([inner[0]["a"].releases, outer["a"].releases]) == [1, 2]


def test_a_training_whose_noise_anyone_can_work_out_leaves_no_bound(tmp_path):
    _, trained = plan_selection(CONFIG, BUDGET, {"a": 320})
    run = Checkpoint(
        round_number=3,
        server_state={},
        client_ids=(),
        client_states=[],
        ledger=trained,
        run_key=RunKey.from_test_seed(1),
        config_hash="hash",
    )
    checkpoints.save(tmp_path / "mr_mtl" / "checkpoints", run)
    _, ledger = plan_selection(CONFIG, BUDGET, {"a": 320, "b": 320})
    costs = put(tmp_path, ledger)
    assert (costs["a"].epsilon, costs["a"].releases) == (math.inf, 2)
    assert (
        costs["a"].why_no_bound
        == "a run on record (mr_mtl) has no bound: the noise follows from training.test_only_seed"
    )
    assert (costs["b"].epsilon, costs["b"].releases, costs["b"].why_no_bound) == (ledger.epsilon("b").best, 1, "")


def test_a_record_that_cannot_be_read_is_not_added_to(tmp_path):
    _, ledger = plan_selection(CONFIG, BUDGET, {"a": 320})
    put(tmp_path, ledger)
    path = tmp_path / EARLIER
    damaged = path.read_text().replace("personalize", "personalise") + path.read_text()[:40]
    path.write_text(damaged)
    with pytest.raises(DataError, match=f"{EARLIER}: line 1 is damaged"):
        put(tmp_path, ledger)
    assert path.read_text() == damaged
