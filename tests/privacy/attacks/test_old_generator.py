"""Attacks break what they are meant to break: noise as it once was, and noise on a grid beside a sum that is not."""

import numpy as np
import pytest

from tests.privacy.attacks import lattice, targets
from tests.privacy.attacks.chance import RARE, assert_decides, pvalue_of_same
from tests.privacy.attacks.old_generator import old_noised_silo_sum, old_noised_user_sum

CASES = 40
FORMS = {
    "one step": (targets.ONE_STEP, old_noised_silo_sum),
    "silo round": (targets.SILO_ROUND, old_noised_silo_sum),
    "users' round": (targets.USERS_ROUND, old_noised_user_sum),
}


@pytest.fixture(params=FORMS)
def form(request):
    """How an old release was scaled, and its noise."""
    return FORMS[request.param]


@pytest.fixture(scope="module")
def sums():
    """The sums with the target and without, by what the other records are."""

    def both(others):
        released = targets.one_step(targets.DIGITS, "stacked", np.array([True, False]), 0.0, others)
        return released.astype(np.float64) / targets.ONE_STEP.unit

    return {others: both(others) for others in ("normal", "blank")}


def release(form, sums, is_member, stddev):
    target, noised = form
    totals = np.where(is_member[:, np.newaxis], sums[0], sums[1]).astype(np.float32)
    return noised(totals, stddev, np.random.default_rng(0)) * np.float32(target.unit)


def margins_of(scores):
    return scores[:, 0] - scores[:, 1]


def test_angles_tell_one_record_more_whatever_the_noise(form, sums):
    is_member = targets.memberships(CASES)
    for stddev in (1.0, targets.LOUD, 10 * targets.LOUD):
        released = release(form, sums["normal"], is_member, stddev)
        scores = lattice.angle_scores(released, sums["normal"], unit=form[0].unit, roundings=form[0].roundings)
        assert_decides(margins_of(scores), is_member)


def test_angles_tell_the_cohort_among_all_4096():
    rng = np.random.default_rng(1)
    updates = rng.normal(size=(12, 64))
    updates = (updates / np.linalg.norm(updates, axis=1, keepdims=True)).astype(np.float32)
    sums = lattice.cohort_sums(updates)
    cohorts = rng.integers(0, len(sums), CASES)
    released = old_noised_user_sum(sums[cohorts], targets.LOUD, rng) / np.float32(3.0)
    scores = lattice.angle_scores(released, sums, unit=1 / 3, roundings=2)
    assert (scores.argmax(axis=1) == cohorts).mean() >= 0.95


def test_the_sums_of_cohorts_are_by_the_bits_of_their_numbers():
    updates = np.eye(3)
    np.testing.assert_array_equal(lattice.cohort_sums(updates)[0b101], [1, 0, 1])
    assert lattice.cohort_sums(updates).shape == (8, 3)


def test_granularity_tells_one_record_more(form, sums):
    is_member = targets.memberships(CASES)
    released = release(form, sums["blank"], is_member, targets.QUIET)
    margins = lattice.granularity_margins(released, *sums["blank"], unit=form[0].unit, roundings=form[0].roundings)
    assert_decides(margins, is_member)


def test_lowest_bits_differ_by_one_record_more(form, sums):
    is_member = targets.memberships(50 * CASES)
    released = release(form, sums["blank"], is_member, targets.QUIET)
    ours, others = (
        lattice.lowest_bits_of_small(released[part], sums["blank"][0], sums["blank"][1], form[0].unit)
        for part in (is_member, ~is_member)
    )
    assert min(len(ours), len(others)) > 1_000
    assert pvalue_of_same(ours, others) < RARE


@pytest.mark.parametrize("step", [2.0**-4, targets.LOUD * 2.0**-10])
def test_residues_tell_one_record_more_where_only_the_noise_is_on_a_grid(step, form, sums):
    target, is_member = form[0], targets.memberships(CASES)
    noise = np.random.default_rng(2).normal(scale=targets.LOUD / step, size=(CASES, sums["normal"].shape[1]))
    totals = np.where(is_member[:, np.newaxis], sums["normal"][0], sums["normal"][1])
    released = (totals + step * np.rint(noise)).astype(np.float32) * np.float32(target.unit)
    scores = lattice.residue_scores(
        released, sums["normal"], targets.LOUD, unit=target.unit, roundings=target.roundings
    )
    assert_decides(margins_of(scores), is_member)


def test_lowest_bits_are_those_of_the_numbers():
    numbers = np.array([1.0, -0.75, 6.0, 2.0**-149, 0.0, 1 + 2.0**-23], np.float32)
    np.testing.assert_array_equal(lattice.lowest_bits(numbers), [0, -2, 1, -149, 128, -23])
