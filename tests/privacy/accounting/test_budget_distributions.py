import math

import numpy as np
import pytest
from scipy import stats

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budget_distributions import divide_by_shares
from tff_pdp.privacy.accounting.budgets import Budgets
from tff_pdp.settings import read_settings

MIXTURE = {
    "kind": "normal_mixture",
    "components": [{"share": 0.9, "mean": 0.5, "stddev": 0.1}, {"share": 0.1, "mean": 10, "stddev": 1}],
    "minimum": 0.1,
}
LOG_UNIFORM = {"kind": "log_uniform", "low": 0.5, "high": 8}
KINDS = "log_uniform, normal_mixture, mix_gauss_1, mix_gauss_2, mix_gauss_3, mix_gauss_4, uniform, gauss, pareto"
# Mean and standard deviation of each component, and its share of ten silos: Liu et al. 2021, table 1.
PAPER = {
    "mix_gauss_1": [(9, 0.1, 0.01), (1, 10, 0.1)],
    "mix_gauss_2": [(9, 0.5, 0.01), (1, 10, 0.1)],
    "mix_gauss_3": [(9, 1, 0.1), (1, 10, 0.1)],
    "mix_gauss_4": [(5, 0.1, 0.01), (4, 1, 0.1), (1, 10, 1)],
}
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


def test_a_mixture_without_exact_shares_draws_as_ever():
    drawn = draw_epsilons(MIXTURE, [f"silo_{number}" for number in range(6)])
    # By the version in which there was no choice.
    assert [float(f"{epsilon:.13g}") for epsilon in drawn.values()] == [
        0.3714525000698,
        0.3506440811241,
        0.4349138434321,
        9.84814912822,
        0.5115768814377,
        0.2844638672410,
    ]
    assert draw_epsilons({**MIXTURE, "exact_shares": False}, list(drawn)) == drawn


@pytest.mark.parametrize("kind", PAPER)
def test_mixtures_of_the_paper_have_exact_shares(kind):
    drawn = np.sort(list(draw_epsilons({"kind": kind}, [f"silo_{number}" for number in range(10)]).values()))
    start = 0
    for number, mean, stddev in PAPER[kind]:
        assert (abs(drawn[start : start + number] - mean) < 5 * stddev).all()
        start += number
    assert start == len(drawn) and len(set(drawn)) == 10


@pytest.mark.parametrize("kind", PAPER)
def test_within_a_component_silos_draw_from_its_gaussian(kind):
    drawn = np.sort(list(draw_epsilons({"kind": kind}, MANY).values()))
    start = 0
    for number, mean, stddev in PAPER[kind]:
        own = drawn[start : start + number * len(MANY) // 10]
        assert stats.kstest(own, stats.norm(mean, stddev).cdf).pvalue > 1e-3
        start += len(own)


def test_components_are_dealt_out_by_the_hashes_of_the_names():
    names = [f"silo_{number}" for number in range(10)]
    liberal = [
        {name for name, epsilon in draw_epsilons({"kind": "mix_gauss_1"}, order, seed).items() if epsilon > 5}
        for order, seed in [(names, 0), (names[::-1], 0), *((names, seed) for seed in range(1, 20))]
    ]
    assert liberal[0] == liberal[1] and all(len(one) == 1 for one in liberal)
    assert len(set().union(*liberal)) > 3, "another seed has another order"
    # Whoever draws its component itself may have none of the rare ones.
    counts = [
        sum(
            epsilon > 5
            for epsilon in draw_epsilons({"kind": "mix_gauss_1", "exact_shares": False}, names, seed).values()
        )
        for seed in range(20)
    ]
    assert min(counts) == 0 and max(counts) > 1


@pytest.mark.parametrize(
    ("number", "shares", "divided"),
    [
        (10, [0.9, 0.1], [9, 1]),
        (30, [0.9, 0.1], [27, 3]),
        (4, [0.9, 0.1], [4, 0]),
        (5, [0.9, 0.1], [5, 0]),
        (5, [0.1, 0.9], [1, 4]),
        (6, [0.9, 0.1], [5, 1]),
        (10, [0.5, 0.4, 0.1], [5, 4, 1]),
        (1, [0.5, 0.4, 0.1], [1, 0, 0]),
        (7, [0.5, 0.4, 0.1], [3, 3, 1]),
        (100, [0.29, 0.71], [29, 71]),
        (0, [0.5, 0.5], [0, 0]),
    ],
)
def test_shares_are_rounded_by_largest_remainders(number, shares, divided):
    assert divide_by_shares(number, shares) == divided


@pytest.mark.parametrize(
    ("distribution", "cdf"),
    [
        ({"kind": "uniform"}, stats.uniform(1, 9).cdf),
        ({"kind": "uniform", "low": 2, "high": 3}, stats.uniform(2, 1).cdf),
        ({"kind": "gauss", "mean": 30}, stats.norm(30, 1).cdf),
        ({"kind": "pareto"}, stats.pareto(1, scale=0.5).cdf),
        ({"kind": "pareto", "minimum": 2, "shape": 3}, stats.pareto(3, scale=2).cdf),
    ],
)
def test_plain_distributions(distribution, cdf):
    assert stats.kstest(list(draw_epsilons(distribution, MANY).values()), cdf).pvalue > 1e-3


@pytest.mark.parametrize("kind", ["gauss", "mix_gauss_1"])
def test_every_epsilon_is_above_a_floor(kind):
    drawn = draw_epsilons({"kind": kind, "minimum": 3.2}, MANY).values()
    assert min(drawn) == 3.2 < max(drawn)


@pytest.mark.parametrize(
    "config, message",
    [
        ([1], rf"distribution must be a mapping whose kind is one of {KINDS}, not \[1\]"),
        ({"kind": "cauchy"}, f"distribution.kind must be one of {KINDS}, not 'cauchy'"),
        ({"kind": "uniform", "low": 10}, "distribution: low 10 must be below high 10"),
        ({"kind": "gauss", "stddev": 0}, "distribution.stddev must be .*, not 0"),
        ({"kind": "pareto", "shape": 0}, "distribution.shape must be .*, not 0"),
        ({"kind": "mix_gauss_1", "components": []}, "unknown key privacy.budgets.distribution.components"),
        ({"kind": "mix_gauss_1", "exact_shares": 1}, "distribution.exact_shares must be .*, not 1"),
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
