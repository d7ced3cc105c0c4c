import math

import numpy as np
import pytest
from scipy import stats

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import Budgets
from tff_pdp.settings import read_settings

MIXTURE = {
    "kind": "normal_mixture",
    "components": [{"share": 0.9, "mean": 0.5, "stddev": 0.1}, {"share": 0.1, "mean": 10, "stddev": 1}],
    "minimum": 0.1,
}
LOG_UNIFORM = {"kind": "log_uniform", "low": 0.5, "high": 8}
MANY = [f"silo_{number}" for number in range(4000)]


def draw_epsilons(distribution, client_ids, seed=3):
    content = {"kind": "drawn", "distribution": distribution, "delta": 1e-5, "seed": seed}
    budgets = read_settings(Budgets, content, "test", "privacy.budgets")
    return {name: budget.epsilon for name, budget in budgets.assign(client_ids).items()}


@pytest.mark.parametrize("config", [MIXTURE, LOG_UNIFORM])
def test_a_draw_depends_on_seed_and_name_alone(config):
    together = draw_epsilons(config, ["c", "a", "b"])
    assert list(together) == ["a", "b", "c"]
    assert all(draw_epsilons(config, [name]) == {name: together[name]} for name in together)
    assert len(set(together.values())) == 3
    other = draw_epsilons(config, ["a", "b", "c"], seed=4)
    assert all(other[name] != together[name] for name in together)


def test_the_mixture_has_its_shares_and_its_components():
    drawn = np.array(list(draw_epsilons(MIXTURE, MANY).values()))
    high = drawn > 3
    assert abs(np.mean(high) - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(MANY))
    # The component must not tell anything about the place within it.
    assert stats.kstest(drawn[high], stats.norm(10, 1).cdf).pvalue > 1e-3
    assert stats.kstest(drawn[~high], stats.norm(0.5, 0.1).cdf).pvalue > 1e-3


def test_draws_below_the_minimum_count_as_the_minimum():
    wide = {
        "kind": "normal_mixture",
        "components": [{"share": 1, "mean": 0.2, "stddev": 0.1}],
        "minimum": 0.2,
    }
    drawn = np.array(list(draw_epsilons(wide, MANY).values()))
    assert drawn.min() == 0.2
    assert abs(np.mean(drawn == 0.2) - 0.5) < 4 * 0.5 / math.sqrt(len(MANY))


def test_log_uniform_is_uniform_in_the_logarithm():
    drawn = np.log(list(draw_epsilons(LOG_UNIFORM, MANY).values()))
    assert stats.kstest(drawn, stats.uniform(math.log(0.5), math.log(16)).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "config, message",
    [
        ([1], r"distribution must be a mapping whose kind is one of log_uniform, normal_mixture, not \[1\]"),
        ({"kind": "uniform"}, "distribution.kind must be one of log_uniform, normal_mixture, not 'uniform'"),
        ({**LOG_UNIFORM, "low": 0}, "distribution.low must be a number above 0, not 0"),
        ({**LOG_UNIFORM, "low": 9}, "distribution: low 9 must be below high 8"),
        ({**LOG_UNIFORM, "high": math.inf}, "distribution.high must be .*, not inf"),
        ({**LOG_UNIFORM, "mean": 1}, "unknown key privacy.budgets.distribution.mean"),
        ({"kind": "log_uniform", "low": 1}, "missing key privacy.budgets.distribution.high"),
        ({**MIXTURE, "minimum": -1}, "distribution.minimum must be .*, not -1"),
        ({**MIXTURE, "components": []}, "distribution.components must be"),
        ({**MIXTURE, "components": MIXTURE["components"][:1]}, "shares of the components must sum to 1, not 0.9"),
        ({**MIXTURE, "components": [{"share": 1, "mean": 1}]}, r"missing key .*components\[0\].stddev"),
        (
            {**MIXTURE, "components": [{"share": 1, "mean": "x", "stddev": 1}]},
            r"components\[0\].mean must be .* not 'x'",
        ),
        ({**MIXTURE, "components": [{"share": 1, "mean": math.inf, "stddev": 1}]}, r"\[0\].mean must be .*, not inf"),
        (
            {**MIXTURE, "components": [{"share": 1, "mean": 1, "stddev": 0}]},
            r"components\[0\].stddev must be .*, not 0",
        ),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        draw_epsilons(config, ["a"])
