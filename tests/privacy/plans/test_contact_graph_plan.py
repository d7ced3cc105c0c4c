"""The plan of node- and edge-level DP: what it accounts for each silo, and what it refuses."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import BudgetError, ConfigError, DataError
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds
from tff_pdp.privacy.accounting.row_influence import PoissonRowsDpEvent
from tff_pdp.privacy.plans.contact_graph import ContactGraph
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.search import Search
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.privacy.plans.unprotected import without_privacy
from tff_pdp.privacy.plans.user import User
from tff_pdp.settings import read_settings

SIZES = {"a": 100, "b": 40, "c": 3}
NODE = RowInfluence("node", "replace_one", 5, "nobody has more than 2 contacts")
EDGE = RowInfluence("edge", "add_or_remove_one", 2, "a pair's contacts are in the two people's rows")
BUDGETS = {"kind": "by_silo", "delta": 1e-4, "silos": {"a": 1, "b": 4, "c": 8}}
SETTINGS = {"batch_size": 20, "clip_norm": 1.5, "budgets": BUDGETS}
USERS = {"batch_size": 20, "users_per_round": 2, "budgets": {"kind": "one_for_all", "epsilon": 1, "delta": 1e-5}}
TRAINING = PlannedTraining(SIZES, gradients_per_round=dict.fromkeys(SIZES, 2), rounds=10, row_influence=NODE)


def read(**changes):
    return read_settings(ContactGraph, {"kind": "contact_graph", **SETTINGS, **changes}, "test", "privacy")


def build(training=TRAINING, **changes):
    return read(**changes).build(training)


SILO_EXAMPLE = read_settings(SiloExample, {"kind": "silo_example", **SETTINGS}, "test", "privacy")


@pytest.fixture(scope="module")
def plan():
    return build()


def test_each_silo_is_charged_for_all_rows_a_person_is_in(plan):
    assert (plan.unit, plan.adjacency) == ("node", Adjacency.REPLACE_ONE)
    ledger = plan.build_ledger()
    for number in range(1, 11):
        plan.charge_round(ledger, number)
    for client_id, changed in {"a": 5, "b": 5, "c": 3}.items():
        mechanism = plan.mechanisms[client_id]
        event = PoissonRowsDpEvent(mechanism.noise_multiplier, mechanism.sampling_rate, changed)
        assert [(e.event, e.count) for e in ledger.entries if e.scope == client_id] == [(event, 20)]
        budget = plan.budgets[client_id]
        alone = epsilon_bounds(dp_accounting.SelfComposedDpEvent(event, 20), 1e-4, Adjacency.REPLACE_ONE).best
        assert 0.98 * budget.epsilon < alone == ledger.epsilon(client_id).best <= budget.epsilon
        # What is accounted is what is computed with.
        assert float(np.float32(mechanism.noise_multiplier)) == mechanism.noise_multiplier
        assert mechanism.sampling_rate == pytest.approx(min(1, 20 / SIZES[client_id]), abs=2**-23)
        expected = min(20, SIZES[client_id])
        assert mechanism.expected_batch_size == pytest.approx(expected, abs=2**-23 * SIZES[client_id])
        assert mechanism.clip_norm == 1.5
    with pytest.raises(BudgetError, match="the plan, and its noise, are for 10 rounds"):
        plan.charge_round(ledger, 11)


def test_a_person_takes_more_noise_than_a_pair_and_a_pair_more_than_an_example(plan):
    edge = build(dataclasses.replace(TRAINING, row_influence=EDGE))
    assert (edge.unit, edge.adjacency) == ("edge", Adjacency.ADD_OR_REMOVE_ONE)
    example = SILO_EXAMPLE.build(dataclasses.replace(TRAINING, row_influence=None))
    for client_id in SIZES:
        noise = [one.mechanisms[client_id].noise_multiplier for one in (plan, edge, example)]
        assert noise[0] > noise[1] > 2 * noise[2]


def test_rows_that_use_no_contacts_cost_no_contact_anything():
    unused = RowInfluence("edge", "add_or_remove_one", 0, "rows have no slots for contacts")
    plan = build(dataclasses.replace(TRAINING, row_influence=unused))
    ledger = plan.build_ledger()
    plan.charge_round(ledger, 1)
    assert all(ledger.epsilon(client_id).best == 0 for client_id in SIZES)


def test_with_given_noise_a_silo_leaves_after_the_last_round_its_budget_pays_for():
    training = dataclasses.replace(TRAINING, rounds=60)
    plan = build(training, noise_multiplier=40.0)
    ledger = plan.build_ledger()
    for number in range(1, 61):
        plan.charge_round(ledger, number)
    assert 0 < plan.last_rounds["a"] < plan.last_rounds["b"] <= 60
    for client_id, budget in plan.budgets.items():
        last = plan.last_rounds[client_id]
        assert sum(entry.count for entry in ledger.entries if entry.scope == client_id) == 2 * last
        more = dp_accounting.SelfComposedDpEvent(plan.gradient_event(client_id), 2 * (last + 1))
        beyond = epsilon_bounds(more, budget.delta, plan.adjacency).best
        assert ledger.epsilon(client_id).best <= budget.epsilon
        assert last == 60 or beyond > budget.epsilon
    with pytest.raises(BudgetError, match="No silo's budget pays"):
        build(training, noise_multiplier=0.1)


def test_the_claim_names_what_it_hangs_on(plan):
    assert plan.claim == "formal-conditional"
    for words in ("number of rows of each silo", "rows of one silo only", "at most 5 rows differ", NODE.rule):
        assert words in plan.claim_reason
    assert "not protected" not in plan.claim_reason
    assert "no cryptographic generator" in plan.claim_reason
    safe = build(generator="chacha20")
    assert (safe.claim, safe.generator) == ("formal-conditional", "chacha20")
    assert "generator" not in safe.claim_reason
    edge = build(dataclasses.replace(TRAINING, row_influence=EDGE))
    assert "people's own features and disease states are not protected" in edge.claim_reason
    unsound = build(dataclasses.replace(TRAINING, unsound="it cheats"))
    assert (unsound.claim, unsound.claim_reason) == ("none", "it cheats")


MOMENTS = {"kind": "dp_moments", "lower": 0.0, "upper": 1.0, "noise_multiplier": 2.0}


@pytest.mark.parametrize(
    ("settings", "training", "message"),
    [
        ({}, {"row_influence": None}, "manifest has no row_influence.*silo_example"),
        ({}, {"selection_rounds": 1}, "selection of clusters.*is calibrated to one row"),
        ({}, {"num_examples_are_noised": True}, "a noised number of examples is calibrated to one row"),
        (
            {},
            {"fixed_events": {"a": ((dp_accounting.GaussianDpEvent(5.0), "means"),)}},
            "before training is calibrated to one row",
        ),
        ({}, {"search": Search(({},), 1, 5.0, 1.0, False)}, r"tuning\.search is calibrated to one row"),
        ({"num_examples": {"kind": "noised", "epsilon": 1.0}}, {}, r"unknown key privacy\.num_examples"),
        ({"feature_scaling": MOMENTS}, {}, r"privacy\.feature_scaling\.kind must be one of .*, not 'dp_moments'"),
        ({"sampler": "paper_shuffled"}, {}, r"unknown key privacy\.sampler"),
        ({"noise_calibration": "paper_rdp"}, {}, r"unknown key privacy\.noise_calibration"),
        ({"clip_norm": math.inf}, {}, r"privacy\.clip_norm must be a number above 0, not inf"),
        ({"users_per_round": 4.0}, {}, r"unknown key privacy\.users_per_round"),
        ({"budgets": {"kind": "one_for_all", "epsilon": 1, "delta": 0.01}}, {}, "'a' is not below 1 / 100"),
    ],
)
def test_what_is_calibrated_for_one_row_is_refused(settings, training, message):
    with pytest.raises(ConfigError, match=message):
        build(dataclasses.replace(TRAINING, **training), **settings)


def test_a_method_that_selects_clusters_is_refused_before_anything_is_released():
    ifca = build_algorithm("ifca", {}, num_clients=3, rounds=10)[0]
    with pytest.raises(ConfigError, match=r"algorithms\.ifca selects a cluster privately, calibrated to one row"):
        read().check(ifca, "uniform")
    read().check(build_algorithm("mr_mtl", {}, num_clients=3, rounds=10)[0], "uniform")


def test_an_impossible_budget_names_the_silo_and_its_rows():
    budgets = {"kind": "by_silo", "delta": 1e-4, "default_epsilon": 4, "silos": {"b": 1e-6}}
    with pytest.raises(BudgetError, match=r"'b'.*differ in up to 5 rows"):
        build(budgets=budgets)


def test_plans_for_independent_examples_are_refused_on_rows():
    with pytest.raises(ConfigError, match=r"one node is in up to 5 of them.*Set privacy.kind to contact_graph"):
        SILO_EXAMPLE.build(TRAINING)
    with pytest.raises(ConfigError, match=r"privacy.kind user is for examples that are independent"):
        read_settings(User, {"kind": "user", **USERS}, "test", "privacy").check_rows(EDGE)
    unprotected = without_privacy(read())
    unprotected.check_rows(EDGE)
    plan = unprotected.build(TRAINING)
    assert plan.claim == "none" and plan.build_ledger() is None


@pytest.mark.parametrize(
    ("influence", "message"),
    [
        (dataclasses.replace(NODE, num_rows=0), "num_rows 0, which must be a whole number, at least 1"),
        (dataclasses.replace(NODE, num_rows=2.5), "num_rows 2.5"),
        (dataclasses.replace(NODE, adjacency="add_or_remove_one"), "unit 'node' and adjacency 'add_or_remove_one'"),
        (dataclasses.replace(EDGE, unit="pair"), "unit 'pair'"),
    ],
)
def test_a_promise_that_means_nothing_is_refused(influence, message):
    with pytest.raises(DataError, match=message):
        build(dataclasses.replace(TRAINING, row_influence=influence))
