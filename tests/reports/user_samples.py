"""A made-up comparison of two methods over users, as large as a test wants it."""

import dataclasses
import math

from tests.reports import report_samples as samples
from tff_pdp.models.metrics import ACCURACY
from tff_pdp.privacy.facts import UserCosts, UserSums
from tff_pdp.reports import content
from tff_pdp.reports.statement import build_user_statement

COSTS = UserCosts(
    epsilon_target=2.0,
    epsilon_spent=1.9876,
    epsilon_rdp=2.2,
    epsilon_pld=1.9876,
    delta=1e-4,
    noise_multiplier=1.5,
    num_noised=10_000,
    noise_to_signal=3.0,
)
NOTHING = dataclasses.replace(
    COSTS, epsilon_spent=0.0, epsilon_rdp=0.0, epsilon_pld=0.0, noise_multiplier=0.0, num_noised=0, noise_to_signal=0.0
)
# 1.5 * sqrt(10,000) / 50 is 3.
SUMS = UserSums(
    rounds=200,
    num_users=1000,
    is_constant=False,
    sampling_rate=0.05,
    expected_cohort=50.0,
    clip_norm=0.5,
    noise_multiplier=1.5,
)


def sample_users(count: int) -> tuple[content.ClientScores, ...]:
    return tuple(
        content.ClientScores(f"user-{place:03d}", one.num_test, one.personal, one.shared)
        for place, one in enumerate(samples.sample_silos(count))
    )


def sample_methods(**costs: UserCosts) -> tuple[content.AlgorithmResult, ...]:
    """Local training, FedAvg and MR-MTL, which is exported, with costs by name."""
    found = {"local_only": NOTHING, "fed_avg": COSTS, "mr_mtl": COSTS, **costs}
    return tuple(
        dataclasses.replace(
            algorithm, claim_reason="The number of users is treated as public", user_costs=found[algorithm.name]
        )
        for algorithm in samples.sample_algorithms(samples.sample_silos(3))
    )


def seeded_methods() -> tuple[content.AlgorithmResult, ...]:
    """The same under a fixed test seed."""
    spent = dict.fromkeys(("epsilon_spent", "epsilon_rdp", "epsilon_pld"), math.inf)
    costs = {name: dataclasses.replace(own, **spent) for name, own in (("local_only", NOTHING), ("fed_avg", COSTS))}
    return tuple(map(samples.without_claim, sample_methods(**costs, mr_mtl=costs["fed_avg"])))


def sample_user_statement(**overrides) -> dict:
    return build_user_statement(**{"algorithms": sample_methods(), "sums": SUMS, **overrides})


def sample_user_report(count: int, **overrides) -> content.Report:
    return content.Report(
        title="Handwriting of many",
        created="2024-05-01 12:00 UTC",
        metric=ACCURACY,
        algorithms=overrides.get("algorithms", sample_methods()),
        silos=(),
        users=sample_users(count),
        privacy=sample_user_statement(**overrides),
        config={"model": "mlp"},
        notes=("MR-MTL: the noise is too much.",),
    )
