"""The algorithms that run on every engine in `make test` call everything that any algorithm calls."""

import functools

import pytest

from tests.contract.contract_support import SMALLER
from tests.contract.covering import COVERING, COVERING_LARGE, operations_of
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.testing.algorithms import MODEL, ROUNDS, SIZES


@functools.cache
def operations(name):
    algorithm, _ = build_algorithm(name, SMALLER.get(name, {}), num_clients=len(SIZES), rounds=ROUNDS, head=MODEL.head)
    return operations_of(algorithm)


def covered(names):
    return set().union(*map(operations, names))


def test_they_are_registered():
    assert set(COVERING_LARGE) <= set(COVERING) <= set(ALGORITHMS.own)


@pytest.mark.parametrize("name", sorted(ALGORITHMS.own))
def test_they_call_what_an_algorithm_calls(name):
    assert operations(name) - covered(COVERING) == set()


def test_an_operation_that_none_of_them_calls_is_found():
    assert operations("mocha") - covered(COVERING.keys() - {"mocha"}) == {"takes client_index", "released as rows"}
