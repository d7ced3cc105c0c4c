import math

import numpy as np
import pytest
from scipy import stats

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import draw_epsilons

MIXTURE = {
    "kind": "normal_mixture",
    "components": [{"share": 0.9, "mean": 0.5, "stddev": 0.1}, {"share": 0.1, "mean": 10, "stddev": 1}],
    "minimum": 0.1,
    "seed": 3,
}
LOG_UNIFORM = {"kind": "log_uniform", "low": 0.5, "high": 8, "seed": 0}
MANY = [f"silo_{number}" for number in range(4000)]


@pytest.mark.parametrize("config", [MIXTURE, LOG_UNIFORM])
def test_a_draw_depends_on_seed_and_name_alone(config):
    together = draw_epsilons(config, ["c", "a", "b"])
    assert list(together) == ["a", "b", "c"]
    assert all(draw_epsilons(config, [name]) == {name: together[name]} for name in together)
    assert len(set(together.values())) == 3
    other = draw_epsilons({**config, "seed": 4}, ["a", "b", "c"])
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
        ([1], "distribution is .1.; it must be a mapping whose `kind` is normal_mixture or log_uniform"),
        ({"kind": "uniform"}, "`kind` is normal_mixture or log_uniform"),
        ({**LOG_UNIFORM, "low": 0}, "distribution.low is 0; it must be positive and finite"),
        ({**LOG_UNIFORM, "low": 9}, "distribution.low is 9, which is not below"),
        ({**LOG_UNIFORM, "high": math.inf}, "distribution.high is inf"),
        ({**LOG_UNIFORM, "seed": 0.5}, "distribution.seed is 0.5; it must be a whole number"),
        ({**LOG_UNIFORM, "mean": 1}, "unknown key `mean`"),
        ({"kind": "log_uniform", "low": 1}, "distribution.high is missing"),
        ({**MIXTURE, "minimum": -1}, "distribution.minimum is -1"),
        ({**MIXTURE, "components": []}, "distribution.components is"),
        ({**MIXTURE, "components": MIXTURE["components"][:1]}, "shares that sum to 0.9; they must sum to 1"),
        ({**MIXTURE, "components": [{"share": 1, "mean": 1}]}, r"components\[0\].stddev is missing"),
        ({**MIXTURE, "components": [{"share": 1, "mean": "x", "stddev": 1}]}, r"components\[0\].mean is 'x'"),
        ({**MIXTURE, "components": [{"share": 1, "mean": math.inf, "stddev": 1}]}, r"\[0\].mean is inf"),
        ({**MIXTURE, "components": [{"share": 1, "mean": 1, "stddev": 0}]}, r"components\[0\].stddev is 0"),
    ],
)
def test_errors_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        draw_epsilons(config, ["a"])
