"""What a search costs, composed by hand; what a silo draws for it; and the plan's noise."""

import collections
import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event

from tests.privacy.accounting.anchor_support import by_transforms
from tests.rounding import standard_errors
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.accounting.repeated_runs import GEOMETRIC, LOGARITHMIC, POISSON, NumberOfRuns
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.search import Search, parse_runs
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.privacy.plans.unprotected import without_privacy
from tff_pdp.settings import read_settings
from tff_pdp.training.search.tune import SearchCosts, search_costs, tune_text

# The second silo's batches hold all of its examples.
SIZES = {"a": 100, "b": 20}
DELTA = 1e-4
BUDGETS = {"kind": "by_silo", "delta": DELTA, "silos": {"a": 2, "b": 4}}
CANDIDATES = ({"prox_weight": 0.1}, {"prox_weight": 1.0}, {"prox_weight": 10.0})
ROUNDS, STEPS, SELECTIONS = 6, 2, 3
# Of the events of up to four runs, composed in another order.
COMPOSED = by_transforms(4 * ROUNDS * STEPS, DELTA)
STATISTICS = dp_event.GaussianDpEvent(20.0)


def make_search(runs, has_pivot=True, score_noise_multiplier=8.0):
    return Search(CANDIDATES, runs, score_noise_multiplier, sensitivity=1.0, has_pivot=has_pivot)


def read(**changes):
    content = {"kind": "silo_example", "batch_size": 20, "budgets": BUDGETS, **changes}
    return read_settings(SiloExample, content, "test", "privacy")


def make_plan(search, selection_rounds=0, **changes):
    return read(**changes).build(
        PlannedTraining(
            SIZES,
            gradients_per_round=dict.fromkeys(SIZES, STEPS),
            rounds=ROUNDS,
            selection_rounds=selection_rounds,
            fixed_events=dict.fromkeys(SIZES, ((STATISTICS, "statistics"),)),
            search=search,
        )
    )


def charged(plan):
    ledger = plan.build_ledger()
    plan.charge_search(ledger)
    return ledger


def gradients_by_hand(plan, client_id, count=ROUNDS * STEPS):
    mechanism = plan.mechanisms[client_id]
    noisy = dp_event.GaussianDpEvent(mechanism.noise_multiplier)
    if mechanism.sampling_rate < 1:
        noisy = dp_event.PoissonSampledDpEvent(mechanism.sampling_rate, noisy)
    return dp_event.SelfComposedDpEvent(noisy, count)


@pytest.mark.parametrize("shape", [LOGARITHMIC, pytest.param(3.0, marks=pytest.mark.all), POISSON])
def test_the_ledger_holds_the_pivot_run_and_the_repetitions_and_stays_within_the_budget(shape):
    plan = make_plan(make_search(NumberOfRuns(4.0, shape)))
    ledger = charged(plan)
    for client_id, budget in plan.budgets.items():
        gradients = gradients_by_hand(plan, client_id)
        run = dp_event.ComposedDpEvent([gradients, dp_event.GaussianDpEvent(8.0)])
        everything = [STATISTICS, gradients, dp_event.RepeatAndSelectDpEvent(run, 4.0, shape)]
        by_hand = epsilon_bounds(dp_event.ComposedDpEvent(everything), DELTA).best
        assert ledger.epsilon(client_id).best == pytest.approx(by_hand, rel=COMPOSED)
        assert 0.999 * budget.epsilon < by_hand <= budget.epsilon


def test_a_method_that_releases_nothing_pays_for_no_pivot_run():
    plan = make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC), has_pivot=False))
    ledger = charged(plan)
    with_pivot = make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC)))
    for client_id in SIZES:
        run = dp_event.ComposedDpEvent([gradients_by_hand(plan, client_id), dp_event.GaussianDpEvent(8.0)])
        everything = dp_event.ComposedDpEvent([STATISTICS, dp_event.RepeatAndSelectDpEvent(run, 4.0, GEOMETRIC)])
        assert ledger.epsilon(client_id).best == pytest.approx(epsilon_bounds(everything, DELTA).best, rel=COMPOSED)
        assert plan.mechanisms[client_id].noise_multiplier < with_pivot.mechanisms[client_id].noise_multiplier


@pytest.mark.parametrize("has_pivot", [True, pytest.param(False, marks=pytest.mark.all)])
def test_a_fixed_grid_is_charged_for_every_run(has_pivot):
    plan = make_plan(make_search(3, has_pivot))
    ledger = charged(plan)
    for client_id, budget in plan.budgets.items():
        runs = 3 + has_pivot
        everything = dp_event.ComposedDpEvent(
            [
                STATISTICS,
                gradients_by_hand(plan, client_id, runs * ROUNDS * STEPS),
                dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(8.0), 3),
            ]
        )
        by_hand = epsilon_bounds(everything, DELTA).best
        assert ledger.epsilon(client_id).best == pytest.approx(by_hand, rel=COMPOSED)
        assert 0.999 * budget.epsilon < by_hand <= budget.epsilon


def test_every_repetition_selects_its_cluster_anew():
    search = make_search(NumberOfRuns(2.0, GEOMETRIC))
    plan = make_plan(search, selection_rounds=SELECTIONS)
    ledger = charged(plan)
    for client_id in SIZES:
        selection = ExponentialMechanismDpEvent(plan.selection_epsilons[client_id])
        training = [gradients_by_hand(plan, client_id), dp_event.SelfComposedDpEvent(selection, SELECTIONS)]
        run = dp_event.ComposedDpEvent([*training, dp_event.GaussianDpEvent(8.0)])
        everything = [STATISTICS, *training, dp_event.RepeatAndSelectDpEvent(run, 2.0, GEOMETRIC)]
        by_hand = epsilon_bounds(dp_event.ComposedDpEvent(everything), DELTA).best
        assert ledger.epsilon(client_id).best == pytest.approx(by_hand, rel=COMPOSED)
        assert by_hand <= plan.budgets[client_id].epsilon


def test_costs_are_those_of_the_search_of_one_training_and_of_every_candidate_once():
    plan = make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC)))
    ledger = charged(plan)
    costs = search_costs(plan, plan.search, ledger)
    for client_id in SIZES:
        training = epsilon_bounds(
            dp_event.ComposedDpEvent([STATISTICS, gradients_by_hand(plan, client_id)]), DELTA
        ).best
        grid = epsilon_bounds(
            dp_event.ComposedDpEvent(
                [
                    STATISTICS,
                    gradients_by_hand(plan, client_id, 4 * ROUNDS * STEPS),
                    dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(8.0), 3),
                ]
            ),
            DELTA,
        ).best
        assert costs[client_id].untuned == pytest.approx(training, rel=COMPOSED)
        assert costs[client_id].fixed_grid == pytest.approx(grid, rel=COMPOSED)
        assert costs[client_id].total == ledger.epsilon(client_id).best > training


def test_with_noised_numbers_of_examples_a_search_costs_its_budget_and_no_other_figure_holds():
    plan = dataclasses.replace(make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC))), num_examples_are_noised=True)
    costs = search_costs(plan, plan.search, charged(plan))
    assert costs == {
        "a": SearchCosts(total=2.0, untuned=None, fixed_grid=None),
        "b": SearchCosts(total=4.0, untuned=None, fixed_grid=None),
    }
    summary = {"algorithm": "mr_mtl", "selected": {"a": {}, "b": {}}, "searched": ["prox_weight"], "candidates": 3}
    text = tune_text({**summary, "folder": "f", "advice": [], "epsilon": {"total": {"minimum": 2.0, "maximum": 4.0}}})
    assert text.splitlines()[1:] == [
        "epsilon at most, the search included (the budget: with noised counts, no smaller bound holds): between 2 and 4"
    ]


def test_nothing_more_fits_after_a_search():
    plan = make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC)))
    ledger = charged(plan)
    with pytest.raises(BudgetError, match="would overspend"):
        plan.charge_search(ledger)


def test_a_score_without_noise_fits_no_budget():
    with pytest.raises(BudgetError, match=r"silo 'a': .* raise tuning.search.score_noise_multiplier"):
        make_plan(make_search(NumberOfRuns(4.0, GEOMETRIC), score_noise_multiplier=1e-4))


@pytest.mark.parametrize("changes", [{"noise_multiplier": 3.0}, {"noise_calibration": "paper_rdp"}])
def test_noise_that_a_search_does_not_set_is_refused(changes):
    with pytest.raises(ConfigError, match=r"tuning.search sets the noise"):
        make_plan(make_search(3), **changes)


def test_a_search_without_privacy_has_no_ledger():
    search = make_search(NumberOfRuns(4.0, GEOMETRIC))
    plan = without_privacy(read()).build(
        PlannedTraining(SIZES, gradients_per_round=dict.fromkeys(SIZES, STEPS), rounds=ROUNDS, search=search)
    )
    assert plan.build_ledger() is None and plan.search is search


def test_a_plan_without_a_search_charges_none():
    plan = make_plan(None)
    with pytest.raises(ConfigError, match="no search"):
        plan.charge_search(plan.build_ledger())


def test_candidates_are_drawn_uniformly_and_with_replacement():
    search, generator = make_search(NumberOfRuns(4.0, GEOMETRIC)), ExactDraws(b"a key of a search")
    drawn = [search.draw_candidate(run, generator)["prox_weight"] for run in range(1, 3001)]
    counts = collections.Counter(drawn)
    assert set(counts) == {0.1, 1.0, 10.0}
    # Four standard deviations of a binomial count.
    assert all(abs(count - 1000) < 4 * math.sqrt(3000 * 2 / 9) for count in counts.values())
    assert any(one == other for one, other in itertools.pairwise(drawn))


def test_a_fixed_grid_tries_each_candidate_once():
    search, generator = make_search(3), ExactDraws(b"a key of a search")
    assert search.draw_number_of_runs(generator) == 3
    assert [search.draw_candidate(run, generator) for run in (1, 2, 3)] == list(CANDIDATES)


def test_scores_carry_the_noise_of_their_event():
    search = Search(CANDIDATES, 3, score_noise_multiplier=8.0, sensitivity=0.25, has_pivot=True)
    generator = ExactDraws(b"a key of a search")
    noise = np.array([search.noised(np.full(5, 0.25), generator) for _ in range(8000)]) - 1.25
    assert np.std(noise) == pytest.approx(8.0 * 0.25, rel=standard_errors() / math.sqrt(2 * len(noise)))
    assert abs(np.mean(noise)) < 4 * 2.0 / math.sqrt(8000)
    assert search.score_event == dp_accounting.GaussianDpEvent(8.0)


@pytest.mark.parametrize(
    ("runs", "shape"), [("geometric", 1.0), ("logarithmic", 0.0), ("poisson", math.inf), (0.5, 0.5)]
)
def test_distributions_have_names_or_shapes(runs, shape):
    assert parse_runs(runs, 3.0, 9) == NumberOfRuns(3.0, shape)
    assert parse_runs("fixed", 3.0, 9) == 9


@pytest.mark.parametrize(
    ("runs", "mean", "message"),
    [
        ("uniform", 3.0, "'uniform' is not known; use geometric, logarithmic, poisson, fixed"),
        ("geometric", 1.0, "mean is 1.0; it must be greater than 1"),
        (-0.5, 3.0, "shape is -0.5"),
    ],
)
def test_distributions_that_are_none(runs, mean, message):
    with pytest.raises(ConfigError, match=message):
        parse_runs(runs, mean, 9)
