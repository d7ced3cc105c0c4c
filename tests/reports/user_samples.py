"""A made-up comparison of two methods over users, as large as a test wants it."""

import dataclasses
import math

from msgspec.structs import replace

from tests.reports import report_samples as samples
from tff_pdp.models.metrics import ACCURACY
from tff_pdp.privacy.facts import MethodFacts, UserCosts, UserFacts, UserSums
from tff_pdp.reports import content
from tff_pdp.reports.statement import Statement, statement

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
NOTHING = replace(
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
        dataclasses.replace(one, id=f"user-{place:03d}") for place, one in enumerate(samples.sample_clients(count))
    )


def sample_methods(**costs: UserCosts) -> tuple[MethodFacts, ...]:
    """Local training, FedAvg and MR-MTL, which is exported, with costs by name."""
    found = {"local_only": NOTHING, "fed_avg": COSTS, "mr_mtl": COSTS, **costs}
    return tuple(
        replace(
            method,
            claim_reason="The number of users is treated as public",
            user_costs=found[method.name],
            budget_exposure="public",
        )
        for method in samples.sample_methods()
    )


def seeded_methods() -> tuple[MethodFacts, ...]:
    """The same under a fixed test seed."""
    spent = dict.fromkeys(("epsilon_spent", "epsilon_rdp", "epsilon_pld"), math.inf)
    costs = {name: replace(own, **spent) for name, own in (("local_only", NOTHING), ("fed_avg", COSTS))}
    return tuple(map(samples.without_claim, sample_methods(**costs, mr_mtl=costs["fed_avg"])))


def sample_user_statement(**overrides) -> Statement:
    return statement(UserFacts(**{"methods": sample_methods(), "sums": SUMS, **overrides}))


def sample_user_report(count: int, **overrides) -> content.Report:
    users, privacy = sample_users(count), sample_user_statement(**overrides)
    return content.Report(
        title="Handwriting of many",
        created="2024-05-01 12:00 UTC",
        metric=ACCURACY,
        algorithms=samples.sample_algorithms(samples.sample_clients(3), methods=privacy.facts.methods),
        clients=users,
        privacy=privacy,
        config={"model": "mlp"},
        notes=("MR-MTL: the noise is too much.",),
    )
