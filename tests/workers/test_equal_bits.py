"""A training has the same bits for any number of workers, and for none."""

import functools

import pytest

from tests.workers.runs import ALGORITHMS, experiment_of, trained

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("lent_workers")]


# Combinations that `make test` and `make test-all` run; `make test-hurt` runs the others.
QUICK = [("mr_mtl", "loop", 2), ("centaur", "vectorized", 2)]
ALL = [*QUICK, *((name, "loop", 2) for name in ALGORITHMS), ("mr_mtl", "loop", 1), ("mr_mtl", "loop", 4)]
# Tests that share workers follow one another.
EVERY = [(name, way, number) for number in (1, 4, 2) for way in ("vectorized", "loop") for name in ALGORITHMS]


@pytest.fixture(scope="module")
def without_workers(clients, tmp_path_factory):
    """A function: the digest of a training without workers."""

    @functools.cache
    def of(name, parallelism):
        return trained(experiment_of(clients, tmp_path_factory.mktemp("here"), name, **settings(parallelism)), name)

    return of


def settings(parallelism):
    # Parts of three clients, so that there are as many parts as workers.
    return {
        "training__client_parallelism": parallelism,
        "training__clients_per_call": 3,
        "training__rounds": 20,
        "training__evaluate_every": 10,
        "training__checkpoint_every": 10,
    }


@pytest.mark.parametrize(
    ("name", "parallelism", "workers"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.all if one in ALL else pytest.mark.hurt)
        for one in EVERY
    ],
)
def test_digests_are_equal_for_any_number_of_workers(clients, tmp_path, without_workers, name, parallelism, workers):
    config = experiment_of(clients, tmp_path / "run", name, workers, **settings(parallelism))
    assert trained(config, name) == without_workers(name, parallelism)
