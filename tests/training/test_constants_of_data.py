"""Claims where constants of the data were taken from all clients' records."""

from types import SimpleNamespace
from typing import Any

import pytest

from tff_pdp.training.privacy_facts import FROM_RECORDS, claim_of_run


def method(claim: str, reason: str, taken: tuple[str, ...]) -> Any:
    plan = SimpleNamespace(claim=claim, claim_reason=reason, clients_without_noise=lambda: [])
    return SimpleNamespace(plan=plan, clients=SimpleNamespace(manifest=SimpleNamespace(treated_as_public=taken)))


STATE: Any = SimpleNamespace(run_key=SimpleNamespace(is_test_only=False))
TAKEN = ("classes of 'activity' (6)",)


@pytest.mark.parametrize(
    ("claim", "reason", "taken", "expected"),
    [
        ("formal", "all is counted", TAKEN, ("formal-conditional", FROM_RECORDS)),
        ("formal", "all is counted", (), ("formal", "all is counted")),
        ("formal-conditional", "sizes are public.", TAKEN, ("formal-conditional", f"sizes are public; {FROM_RECORDS}")),
        ("none", "no noise", TAKEN, ("none", "no noise")),
        ("empirical", "attacks found nothing", TAKEN, ("empirical", "attacks found nothing")),
    ],
)
def test_a_guarantee_depends_on_constants_taken_from_records(claim, reason, taken, expected):
    assert claim_of_run(method(claim, reason, taken), STATE) == expected
