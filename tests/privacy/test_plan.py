import math

import numpy as np
import pytest

from tff_pdp.config import PrivacyConfig
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.plan import build_no_privacy_plan, build_silo_example_plan

SIZES = {"a": 100, "b": 40, "c": 10}
CONFIG = PrivacyConfig(
    plan="silo_example", batch_size=20, clip_norm=1.5, budgets={"delta": 1e-4, "silos": {"a": 1, "b": 4, "c": 8}}
)


@pytest.fixture(scope="module")
def plan():
    return build_silo_example_plan(CONFIG, SIZES, gradients_per_round=2, rounds=10)


def test_each_silo_has_its_own_mechanism(plan):
    rates = {client_id: mechanism.sampling_rate for client_id, mechanism in plan.mechanisms.items()}
    assert rates == pytest.approx({"a": 0.2, "b": 0.5, "c": 1.0}, abs=2**-23)
    # What is accounted is what is computed with: rates on the sampler's grid, noise in float32, both on the safe side.
    assert all(rate >= exact for rate, exact in zip(rates.values(), (0.2, 0.5, 1.0), strict=True))
    assert all(rate * 2**23 == int(rate * 2**23) for rate in rates.values())
    for mechanism in plan.mechanisms.values():
        assert float(np.float32(mechanism.noise_multiplier)) == mechanism.noise_multiplier
        assert float(np.float32(mechanism.sampling_rate)) == mechanism.sampling_rate
    batches = {client_id: mechanism.expected_batch_size for client_id, mechanism in plan.mechanisms.items()}
    assert batches == pytest.approx({"a": 20.0, "b": 20.0, "c": 10.0}, rel=1e-5)


def test_a_delta_that_lets_one_record_be_published_is_refused():
    config = PrivacyConfig(plan="silo_example", batch_size=10, budgets={"delta": 0.05, "epsilon": 4})
    with pytest.raises(ConfigError, match="'a' is not below 1 / 100"):
        build_silo_example_plan(config, SIZES, gradients_per_round=1, rounds=1)


def test_the_planned_rounds_spend_at_most_the_budget_and_no_round_more_is_possible(plan):
    ledger = plan.build_ledger()
    for _ in range(10):
        plan.charge_round(ledger)
    for client_id, budget in plan.budgets.items():
        assert 0.98 * budget.epsilon < ledger.epsilon(client_id).best <= budget.epsilon
    before = ledger.to_json()
    with pytest.raises(BudgetError):
        for _ in range(5):
            plan.charge_round(ledger)
    spent = {client_id: ledger.epsilon(client_id).best for client_id in plan.budgets}
    assert all(spent[client_id] <= budget.epsilon for client_id, budget in plan.budgets.items())
    assert len(ledger.to_json()) >= len(before)


def test_twice_the_gradients_need_more_noise(plan):
    twice = build_silo_example_plan(CONFIG, SIZES, gradients_per_round=4, rounds=10)
    for client_id in SIZES:
        assert twice.mechanisms[client_id].noise_multiplier > plan.mechanisms[client_id].noise_multiplier


def test_an_impossible_budget_names_the_silo():
    config = PrivacyConfig(
        plan="silo_example", batch_size=10, budgets={"delta": 1e-9, "default_epsilon": 4, "silos": {"b": 1e-7}}
    )
    with pytest.raises(BudgetError, match="'b'"):
        build_silo_example_plan(config, SIZES, gradients_per_round=100, rounds=1000)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf])
def test_a_clip_that_bounds_nothing_is_refused(clip_norm):
    config = PrivacyConfig(plan="silo_example", batch_size=10, clip_norm=clip_norm, budgets=CONFIG.budgets)
    with pytest.raises(ConfigError, match="clip_norm"):
        build_silo_example_plan(config, SIZES, gradients_per_round=1, rounds=1)


def test_without_privacy_nothing_is_clipped_noised_or_claimed():
    plan = build_no_privacy_plan(CONFIG, SIZES, gradients_per_round=1, rounds=1)
    assert plan.claim == "none"
    assert plan.build_ledger() is None
    assert {mechanism.noise_multiplier for mechanism in plan.mechanisms.values()} == {0.0}
    assert {mechanism.clip_norm for mechanism in plan.mechanisms.values()} == {math.inf}
