"""Clients are cut into parts by a public rule, and sums of parts are merged in one tree, whoever computes the parts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess.parts import (
    NUM_PARTS,
    are_side_by_side,
    combined_nodes,
    divide,
    merged_nodes,
    ranges,
    total,
)

ROWS = _tff.to_type(_tff.TensorType(np.float32, [None]))


def values(sizes):
    return {"x": ClientValues.from_members(ROWS, [np.zeros(size, np.float32) for size in sizes])}


def text(first, second):
    return f"({first}{second})"


def test_clients_one_by_one_are_consecutive_and_halves_of_the_parts_have_half_of_them():
    parts = divide(values([1] * 20), "loop", 256)
    assert [len(part) for part in parts] == [2, 3, 2, 3, 2, 3, 2, 3]
    assert [int(chunk[0]) for part in parts for chunk in part] == list(range(20))


@pytest.mark.parametrize("num_clients", [0, 1, 7, 8, 9])
def test_there_are_at_most_as_many_parts_as_clients(num_clients):
    parts = divide(values([1] * num_clients), "loop", 256)
    assert len(parts) == min(num_clients, NUM_PARTS)
    assert sum(len(part) for part in parts) == num_clients


def test_every_stack_is_a_part_of_clients_of_equal_shapes():
    parts = divide(values([1, 2, 1, 1, 2]), "vectorized", 2)
    assert [[chunk.tolist() for chunk in part] for part in parts] == [[[0, 2]], [[3]], [[1, 4]]]


# A million values in a stack are worth a stack of its own; there are at most eight stacks, of two clients at least.
@pytest.mark.parametrize(
    ("num_clients", "num_shared", "sizes"),
    [
        (20, 1000, [20]),
        (20, 169_462, [10, 10]),
        (20, 300_000, [5, 5, 5, 5]),
        (20, 10**9, [2, 3, 2, 3, 2, 3, 2, 3]),
        (3, 10**9, [3]),
        (5, 10**9, [2, 3]),
        (20, None, [20]),
        (300, 1000, [256, 44]),
        (300, 10**9, [30] * 10),
        (300, None, [256, 44]),
    ],
)
def test_large_work_is_divided_into_several_stacks(num_clients, num_shared, sizes):
    parts = divide(values([1] * num_clients), "vectorized", 256, num_shared)
    assert [len(chunk) for part in parts for chunk in part] == sizes
    assert [int(client) for part in parts for chunk in part for client in chunk] == list(range(num_clients))
    # Eight cores then compute at most 256 clients at a time.
    assert are_side_by_side(parts, 256) == (max(sizes) <= 32)


def test_values_of_fixed_shape_count_as_work_and_examples_do_not():
    weights = _tff.to_type(_tff.TensorType(np.float32, [2**19]))
    states = {"state": ClientValues.from_columns(weights, np.zeros([4, 2**19], np.float32))}
    assert [len(part[0]) for part in divide(states, "vectorized", 256, 0)] == [2, 2]
    assert [len(part[0]) for part in divide(values([2**19] * 4), "vectorized", 256, 0)] == [4]


@given(st.integers(1, 40), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_the_tree_of_sums_does_not_depend_on_who_computes_which_parts(num_parts, shares):
    leaves = [(part, f"{part}.") for part in range(num_parts)]
    whole = total(merged_nodes(leaves, text), text)
    of_workers = [merged_nodes(leaves[one.start : one.stop], text) for one in ranges(num_parts, shares)]
    assert total(itertools.chain(*of_workers), text) == whole
    assert "".join(filter(lambda sign: sign not in "()", whole)) == "".join(own for _, own in leaves)


@given(st.integers(1, 300))
def test_few_sums_are_kept_at_a_time(num_parts):
    """Sums are as large as the model; merging as they come keeps a logarithm of them."""
    nodes = [(node, own) for node, own in merged_nodes(((part, "") for part in range(num_parts)), text)]
    assert len(combined_nodes(nodes, text)) == bin(num_parts).count("1")
