"""Divides clients into parts by a public rule, and adds up the parts' sums in a fixed tree.

A part has sums of its own, which start from nothing. Parts depend on the clients' shapes, on the number of values that
the server sends, on the mode, on the kind of device and on the size of a call alone. The tree depends on the number of
parts alone. So the sums over all clients have the same bits, whatever computes the parts: one core, several cores, or
workers on several machines.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from tff_pdp.engines import structures
from tff_pdp.engines.client_values import ClientValues, same_shapes

# How clients are computed: one by one, as stacks, or as stacks that XLA compiles as far as it may.
Mode = Literal["loop", "vectorized", "compiled"]
# Clients of a call, in order, int64 `[clients]`; one client in the mode `loop`.
Chunk = np.ndarray
# The number of parts decides how sums round, so the number is the same on all machines.
NUM_PARTS = 8
# Stacks whose clients compute on fewer values, all together, are not divided: their time is that of many small
# operations, and TensorFlow runs these on several cores anyway.
_LEAST_VALUES = 2**20
_Sum = TypeVar("_Sum")


def divide(
    own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int, num_shared: int | None = None
) -> list[list[Chunk]]:
    """Divides the clients of a computation into parts; a part is a list of calls.

    In the mode `loop`, there are at most `NUM_PARTS` parts, and every client is a call. In other modes, every part is a
    call with a stack of clients of equal shapes. For a CPU, clients whose work is large are divided into several stacks
    of equal size, which several cores compute.

    Args:
      own: clients' values by name.
      mode: way in which clients are computed.
      clients_per_call: largest number of clients that are computed at a time.
      num_shared: for a CPU, number of values that the server sends to each client; None for a GPU.
    """
    if not own:
        return []
    if mode == "loop":
        chunks = [np.array([index]) for index in range(len(next(iter(own.values()))))]
        num_parts = min(NUM_PARTS, clients_per_call, len(chunks))
        # Consecutive clients, so that half of the parts have half of the clients.
        ends = [len(chunks) * part // num_parts for part in range(num_parts + 1)] if num_parts else [0]
        return [chunks[begin:end] for begin, end in itertools.pairwise(ends)]
    num_values = 0 if num_shared is None else num_shared + sum(map(_num_fixed, own.values()))
    return [
        [np.array(group[begin:end])]
        for group in same_shapes(own.values())
        for begin, end in itertools.pairwise(_ends_of_stacks(len(group), clients_per_call, num_values))
    ]


def are_side_by_side(parts: Sequence[Sequence[Chunk]], clients_per_call: int) -> bool:
    """Checks if several cores may compute parts side by side, with at most `clients_per_call` clients at a time."""
    largest = max((len(chunk) for part in parts for chunk in part), default=0)
    return largest <= max(clients_per_call // NUM_PARTS, 1)


def _ends_of_stacks(num_clients: int, clients_per_call: int, num_values: int) -> list[int]:
    """Returns the places of stacks: 0 and the end of each stack; `num_values` are the values of one client."""
    most = min(NUM_PARTS, num_clients // 2, num_clients * num_values // _LEAST_VALUES)
    if most < 2:
        return [*range(0, num_clients, clients_per_call), num_clients]
    # Several cores compute stacks at a time, and a power of two keeps most numbers of cores equally busy.
    largest = max(clients_per_call // NUM_PARTS, 1)
    num_stacks = max(1 << most.bit_length() - 1, -(-num_clients // largest))
    return [num_clients * stack // num_stacks for stack in range(num_stacks + 1)]


def _num_fixed(values: ClientValues) -> int:
    """Counts a client's values in leaves of fixed shape, such as a state's, but not examples'."""
    specs = structures.leaf_specs(values.member_type)
    return sum(spec.shape.num_elements() or 0 for spec in specs if spec.shape.is_fully_defined())


def clients_of(part: Sequence[Chunk]) -> np.ndarray:
    """Returns the clients of a part, in the order of its calls: int64 `[clients]`."""
    return np.concatenate(list(part))


class Node(NamedTuple):
    """A node of the tree of sums: the parts from `first` to `first + size`, where `size` is a power of two.

    `first` is a multiple of `size`.
    """

    first: int
    size: int


def merged_nodes(leaves: Iterable[tuple[int, _Sum]], merge: Callable[[_Sum, _Sum], _Sum]) -> list[tuple[Node, _Sum]]:
    """Merges the sums of consecutive parts to the fewest nodes of the tree of sums.

    Args:
      leaves: sums of consecutive parts, in order, each with the part's number.
      merge: function that merges two sums; the earlier sum is the first argument.

    >>> merged_nodes(((part, str(part)) for part in range(3, 8)), lambda one, other: f"({one}{other})")
    [(Node(first=3, size=1), '3'), (Node(first=4, size=4), '((45)(67))')]
    """
    return combined_nodes(((Node(part, 1), own) for part, own in leaves), merge)


def combined_nodes(nodes: Iterable[tuple[Node, _Sum]], merge: Callable[[_Sum, _Sum], _Sum]) -> list[tuple[Node, _Sum]]:
    """Merges consecutive nodes, in order of their parts, to the fewest nodes of the tree of sums."""
    found: list[tuple[Node, _Sum]] = []
    for node, own in nodes:
        while found and found[-1][0].size == node.size and found[-1][0].first % (2 * node.size) == 0:
            earlier, earlier_sum = found.pop()
            own = merge(earlier_sum, own)
            node = Node(earlier.first, 2 * node.size)
        found.append((node, own))
    return found


def total(nodes: Iterable[tuple[Node, _Sum]], merge: Callable[[_Sum, _Sum], _Sum]) -> _Sum:
    """Merges nodes, which contain all parts in order, to the sum over all clients.

    >>> nodes = merged_nodes(((part, str(part)) for part in range(7)), lambda one, other: f"({one}{other})")
    >>> total(nodes, lambda one, other: f"({one}{other})")
    '(((01)(23))((45)6))'
    """
    *others, (_, merged) = combined_nodes(nodes, merge)
    for _, earlier in reversed(others):
        merged = merge(earlier, merged)
    return merged


def ranges(num_parts: int, shares: Sequence[float]) -> list[range]:
    """Divides parts into consecutive ranges in proportion to shares, one range for each share; ranges may be empty.

    >>> ranges(8, [1, 1, 2])
    [range(0, 2), range(2, 4), range(4, 8)]
    """
    ends = np.round(num_parts * np.cumsum(shares) / np.sum(shares)).astype(int).tolist()
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
