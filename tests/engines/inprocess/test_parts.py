"""Clients are cut into parts by a public rule, and sums of parts are merged in one tree, whoever computes the parts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess.parts import NUM_PARTS, combined_nodes, divide, merged_nodes, ranges, total

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
