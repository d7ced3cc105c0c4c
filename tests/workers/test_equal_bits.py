"""A training has the same bits for any number of workers, and for none."""

import pytest

from tests.tiers import parameters
from tests.workers.runs import ALGORITHMS, experiment_of, trained

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("lent_workers")]


@pytest.mark.parametrize(
    ("name", "parallelism"),
    parameters(
        [(name, way) for name in ALGORITHMS for way in ("loop", "vectorized")],
        test=[("mr_mtl", "loop"), ("centaur", "vectorized")],
    ),
)
def test_digests_are_equal_for_any_number_of_workers(clients, tmp_path, name, parallelism):
    settings = {"training__client_parallelism": parallelism, "training__clients_per_call": 3}
    digests = {
        number: trained(experiment_of(clients, tmp_path / f"{number}", name, number, **settings), name)
        for number in (0, 1, 2, 4)
    }
    assert len(set(digests.values())) == 1, digests
