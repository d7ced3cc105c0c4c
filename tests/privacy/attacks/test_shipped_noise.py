"""What is released tells an attacker who looks at its digits nothing of one record or one user.

Silos and users have 2,000 cases in every form in `make test-all`. Half of them have the target, and the attacker knows
all but which: the other records, the model, the noise and every constant.
"""

import dataclasses

import numpy as np
import pytest

from tests.privacy.attacks import lattice, targets
from tests.privacy.attacks.chance import (
    RARE,
    assert_at_chance,
    assert_even_ranks,
    assert_same_margins,
    pvalue_of_same,
)
from tests.tiers import amount, parameters
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, TreeNoise

CASES = amount(test=200, all=2_000)
# Of what is slow and another form of the same noise.
FEWER_CASES = amount(test=100, all=400)
FORMS = [
    "one step: stacked",
    "one step: looped",
    "one step of a large model: stacked",
    "one step of a large model: looped",
    *(f"{kind} round: {engine}" for kind in ("silo", "users") for engine in ("native", "loop", "vectorized")),
    "users round, adaptive clip: loop",
    "users round, tree: loop",
]
EVERY_CHANGE = ["one step: stacked", "silo round: vectorized", "users round: loop"]
# Much noise on the sum needs much on the count.
NOISES = {"users round, adaptive clip": AdaptiveClip(count_stddev=60.0), "users round, tree": TreeNoise()}


@dataclasses.dataclass(frozen=True)
class Releases:
    """Released values of each case with their target, and the attacker's sums with it and without."""

    target: targets.Target
    is_member: np.ndarray
    released: np.ndarray
    sums: np.ndarray

    @property
    def scaling(self):
        """What attacks know of how values were scaled."""
        return {"unit": self.target.unit, "roundings": self.target.roundings}


def build_releases(form, noise_multiplier, others, engines):
    kind, way = form.split(": ")
    is_member = targets.memberships(FEWER_CASES if kind in NOISES else CASES)
    both = np.array([True, False])
    if kind.startswith("one step"):
        model = targets.LARGE if "large" in kind else targets.DIGITS
        released = targets.one_step(model, way, is_member, noise_multiplier, others)
        target, exact = targets.ONE_STEP, targets.one_step(model, way, both, 0.0, others)
    elif kind == "silo round":
        with engines[way].install():
            released = targets.silo_round(targets.DIGITS, is_member, noise_multiplier, others)
            target, exact = targets.SILO_ROUND, targets.silo_round(targets.DIGITS, both, 0.0, others)
    else:
        with engines[way].install():
            released, exact = (
                targets.users_rounds(targets.DIGITS, targets.cohorts_of(members), z, others, NOISES.get(kind))
                for members, z in ((is_member, noise_multiplier), (both, 0.0))
            )
        target = targets.USERS_ROUND
    return Releases(target, is_member, released, exact.astype(np.float64) / target.unit)


@pytest.fixture(scope="module", params=parameters(FORMS, test=EVERY_CHANGE))
def form(request):
    """Who releases, and how that is computed."""
    return request.param


@pytest.fixture(scope="module")
def loud(form, engines):
    """Releases with so much noise that an honest attack is right in no more than 50.2 % of cases."""
    return build_releases(form, targets.LOUD, "normal", engines)


@pytest.fixture(scope="module")
def quiet(form, engines):
    """Releases with little noise, where the other records are blank."""
    return build_releases(form, targets.QUIET, "blank", engines)


def test_releases_are_the_attackers_sums_and_noise_of_the_known_size(loud, quiet):
    """Otherwise attacks would fail for a reason of their own."""
    for releases, noise_multiplier in ((loud, targets.LOUD), (quiet, targets.QUIET)):
        totals = np.where(releases.is_member[:, np.newaxis], releases.sums[0], releases.sums[1])
        noise = (releases.released / releases.target.unit - totals) / (noise_multiplier * targets.CLIP)
        assert np.abs(noise.mean(axis=0)).max() < 6 / np.sqrt(len(noise))
        # The adaptive clip has more, as it spends on its count.
        assert 0.98 < noise.std() < 1.12
        assert 0.7 < np.linalg.norm(releases.sums[0] - releases.sums[1]) < 1.001


def test_angles_tell_nothing_of_a_record(loud):
    scores = lattice.angle_scores(loud.released, loud.sums, **loud.scaling)
    assert_at_chance(scores[:, 0] - scores[:, 1], loud.is_member)
    assert_same_margins(scores[:, 0] - scores[:, 1], loud.is_member)


def test_residues_tell_nothing_of_a_record(loud):
    scores = lattice.residue_scores(loud.released, loud.sums, targets.LOUD, **loud.scaling)
    assert_at_chance(scores[:, 0] - scores[:, 1], loud.is_member)
    assert_same_margins(scores[:, 0] - scores[:, 1], loud.is_member)


def test_granularity_tells_nothing_of_a_record(quiet):
    assert_at_chance(lattice.granularity_margins(quiet.released, *quiet.sums, **quiet.scaling), quiet.is_member)


def test_lowest_bits_are_the_same_with_a_record_and_without(loud, quiet):
    parts = loud.is_member, ~loud.is_member
    assert pvalue_of_same(*(lattice.lowest_bits(loud.released[part]).ravel() for part in parts)) > RARE
    small = [
        lattice.lowest_bits_of_small(quiet.released[part], quiet.sums[0], quiet.sums[1], quiet.target.unit)
        for part in parts
    ]
    assert min(map(len, small)) > 50
    assert pvalue_of_same(*small) > RARE


@pytest.mark.parametrize(
    ("way", "num_users"),
    parameters([("native", 8), ("loop", 8), ("vectorized", 8), ("loop", 12)], test=[("loop", 8)]),
)
def test_angles_tell_nothing_of_a_cohort_among_all_there_can_be(way, num_users, engines):
    # With 12 users there are 4,096 of them to score.
    cases = CASES if num_users < 12 else FEWER_CASES
    numbers = np.random.default_rng(num_users).integers(0, 2**num_users, cases)
    cohorts = [[user for user in range(num_users) if number >> user & 1] for number in numbers]
    with engines[way].install():
        released = targets.users_rounds(targets.TINY, [*cohorts, [num_users - 1]], targets.LOUD)[:-1]
        exact = [targets.users_rounds(targets.TINY, [[user], [num_users - 1]], 0.0)[0] for user in range(num_users)]
    sums = lattice.cohort_sums(np.stack(exact) / targets.USERS_ROUND.unit)
    unit, roundings = targets.USERS_ROUND.unit, targets.USERS_ROUND.roundings
    scores = lattice.angle_scores(released, sums, unit=unit, roundings=roundings)
    ranks = np.array([lattice.rank_of(*case) for case in zip(scores, numbers, strict=True)])
    assert_even_ranks(ranks, len(sums))
