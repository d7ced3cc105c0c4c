"""Judges attacks by how often they are right."""

import numpy as np
from scipy import stats

LEVEL = 0.999
# Besides the decisions, so many more tests of one sample that chance must fail them more rarely.
RARE = 1e-4


def is_right(margins: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """Returns whether decisions for members by positive margins are right; a coin decides at zero."""
    coins = np.random.default_rng(0).integers(0, 2, len(margins)) * 2 - 1
    return (np.where(margins == 0, coins, margins) > 0) == is_member


def assert_decides(margins: np.ndarray, is_member: np.ndarray, share: float = 0.95) -> None:
    """Asserts that an attack is right in nearly all cases."""
    right = is_right(margins, is_member)
    assert right.sum() >= share * len(right), f"{right.sum()} of {len(right)} cases are right"


def assert_at_chance(margins: np.ndarray, is_member: np.ndarray) -> None:
    """Asserts that an attack is right in as many cases as a coin would be."""
    assert_as_often(int(is_right(margins, is_member).sum()), len(margins), 0.5)


def assert_same_margins(margins: np.ndarray, is_member: np.ndarray) -> None:
    """Asserts that margins are no larger for members, so that no other threshold tells them."""
    pvalue = stats.mannwhitneyu(margins[is_member], margins[~is_member]).pvalue
    assert pvalue > RARE, f"margins differ by membership: p = {pvalue:.2g}"


def assert_as_often(hits: int, cases: int, chance: float) -> None:
    """Asserts that a number of hits is within the exact interval of their chance."""
    low, high = stats.binom.interval(LEVEL, cases, chance)
    assert low <= hits <= high, f"{hits} of {cases}, where chance gives {low:.0f} to {high:.0f}"


def assert_even_ranks(ranks: np.ndarray, hypotheses: int) -> None:
    """Asserts that the true one of so many hypotheses is best as often as any, and has any rank as often as any."""
    assert_as_often(int((ranks == 0).sum()), len(ranks), 1 / hypotheses)
    counts = np.bincount(ranks * 16 // hypotheses, minlength=16)
    pvalue = stats.chisquare(counts).pvalue
    assert pvalue > RARE, f"ranks in sixteenths of {hypotheses}: {counts.tolist()}"


def pvalue_of_same(values: np.ndarray, others: np.ndarray) -> float:
    """Returns the p-value of a chi-square test that two samples of whole numbers have the same distribution."""
    kinds, numbers = np.unique(np.concatenate([values, others]), return_inverse=True)
    table = np.stack(
        [np.bincount(part, minlength=len(kinds)) for part in (numbers[: len(values)], numbers[len(values) :])]
    )
    # Those that are rare go together.
    is_rare = table.sum(axis=0) < 40
    table = np.concatenate([table[:, ~is_rare], table[:, is_rare].sum(axis=1, keepdims=True)], axis=1)
    table = table[:, table.sum(axis=0) > 0]
    return 1.0 if table.shape[1] < 2 else float(stats.chi2_contingency(table)[1])
