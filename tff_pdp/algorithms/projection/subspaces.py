"""Finds the subspace that liberal silos' updates span, tensor by tensor, and projects strict silos' mean into it.

Source: Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2021, Algorithm 3.
"""

import collections
from typing import NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import map_weights
from tff_pdp.models.base import Weights

# Singular values below this fraction of the largest are rounding.
_SMALLEST_SINGULAR_VALUE = 1e-6
# Some thousand roundings of float64.
_ROUNDING = 1e-12


class Subspaces(NamedTuple):
    """An affine subspace for each tensor of d weights.

    Attributes:
      basis: by tensor, orthonormal rows, float32 `[k, d]`; rows beyond the rank are zeros.
      centre: by tensor, a point of the subspace, float32 `[d]`.
    """

    basis: Weights
    centre: Weights


def dims_of(size: int, projection_dims: int, num_clients: int) -> int:
    """Returns the number k of basis vectors for a tensor: `projection_dims`, but at most `size` and `num_clients`.

    A subspace has no more dimensions than the tensor has weights, or than there are clients, whose rows span it.

    >>> dims_of(7840, 5, 50), dims_of(10, 64, 50), dims_of(7840, 64, 10)
    (5, 10, 10)
    """
    return min(projection_dims, size, num_clients)


def no_subspaces(weights: Weights, projection_dims: int, num_clients: int) -> Subspaces:
    """Returns subspaces of zeros, in the shapes that `subspaces_of` gives for tensors shaped like `weights`."""
    sizes = {name: tf.convert_to_tensor(value).shape.num_elements() for name, value in weights.items()}
    return Subspaces(
        collections.OrderedDict(
            (name, tf.zeros([dims_of(size, projection_dims, num_clients), size])) for name, size in sizes.items()
        ),
        collections.OrderedDict((name, tf.zeros([size])) for name, size in sizes.items()),
    )


def subspaces_of(rows: Weights, members: tf.Tensor, projection_dims: int, *, centred: bool) -> Subspaces:
    """Finds, for each tensor, the subspace of the largest singular values of the members' rows.

    The centre is the mean of the members' rows. It is zero if `centred` is false, or if fewer than two clients are
    members, since a single row minus its own mean would span nothing.

    Args:
      rows: by tensor, float32 `[clients, ...]`.
      members: float32 `[clients]`, 1 for the clients whose rows span the subspace, else 0.
      projection_dims: largest number k of basis rows.
      centred: whether the subspace goes through the mean of the rows instead of zero.
    """
    size = tf.reduce_sum(tf.cast(members, tf.float64))
    basis, centre = collections.OrderedDict(), collections.OrderedDict()
    for name, value in rows.items():
        # In float64, which separates rank from rounding.
        matrix = tf.cast(_rows_of(members, flat_rows(value)), tf.float64)
        mean = tf.reduce_sum(matrix, axis=0) / tf.maximum(size, 1.0)
        middle = tf.where(size > 1, mean, tf.zeros_like(mean)) if centred else tf.zeros_like(mean)
        clients, width = (int(axis or 0) for axis in matrix.shape)
        number = dims_of(width, projection_dims, clients)
        scale = tf.reduce_max(tf.abs(matrix))
        directions = _leading_directions(_rows_of(members, matrix - middle), number, scale)
        basis[name], centre[name] = tf.cast(directions, tf.float32), tf.cast(middle, tf.float32)
    return Subspaces(basis, centre)


def _leading_directions(matrix: tf.Tensor, number: int, scale: tf.Tensor) -> tf.Tensor:
    """Returns the first right singular vectors of `[clients, d]` as rows `[number, d]`; zeros beyond the rank."""
    # A thin QR first: what is left are the singular vectors of a small matrix.
    orthonormal, triangle = tf.linalg.qr(tf.transpose(matrix), full_matrices=False)
    values, left, _ = tf.linalg.svd(triangle)
    # Rows that are equal differ from their mean by rounding alone, which is small beside the rows themselves.
    is_kept = values > tf.maximum(_SMALLEST_SINGULAR_VALUE * values[0], _ROUNDING * scale)
    directions = tf.matmul(orthonormal, left[:, :number])
    # A singular vector has no sign of its own, and libraries differ: its largest entry is made positive.
    largest = tf.argmax(tf.abs(directions), axis=0, output_type=tf.int32)
    signs = tf.sign(tf.gather_nd(directions, tf.stack([largest, tf.range(number)], axis=1)))
    return tf.transpose(directions * signs * tf.cast(is_kept[:number], tf.float64))


def coordinates(subspaces: Subspaces, update: Weights) -> Weights:
    """Returns an update's coordinates `V (update - centre)`, by tensor, float32 `[k]`."""
    return collections.OrderedDict(
        (name, tf.linalg.matvec(subspaces.basis[name], tf.reshape(value, [-1]) - subspaces.centre[name]))
        for name, value in update.items()
    )


def lifted(subspaces: Subspaces, coordinates: Weights, shaped_as: Weights) -> Weights:
    """Returns the points `centre + V^T coordinates`, by tensor, in the shapes of `shaped_as`."""
    return collections.OrderedDict(
        (
            name,
            tf.reshape(
                subspaces.centre[name] + tf.linalg.matvec(subspaces.basis[name], coordinates[name], transpose_a=True),
                tf.shape(value),
            ),
        )
        for name, value in shaped_as.items()
    )


def flat_rows(rows: tf.Tensor) -> tf.Tensor:
    """Reshapes `[clients, ...]` to `[clients, d]`."""
    return tf.reshape(rows, [rows.shape[0], -1])


def joined(weights: Weights, *, leading: int = 0) -> Weights:
    """Joins all tensors into one, named `joint`; the first `leading` axes, which all tensors share, are kept."""
    return collections.OrderedDict(
        joint=tf.concat(
            [tf.reshape(value, [*value.shape[:leading], -1]) for value in map(tf.convert_to_tensor, weights.values())],
            axis=leading,
        )
    )


def parted(joint: Weights, shaped_as: Weights) -> Weights:
    """Parts the tensor that `joined` has joined, into the shapes of `shaped_as`."""
    sizes = [tf.convert_to_tensor(value).shape.num_elements() for value in shaped_as.values()]
    parts = dict(zip(shaped_as, tf.split(joint["joint"], sizes), strict=True))
    return collections.OrderedDict(
        (name, tf.reshape(parts[name], tf.shape(value))) for name, value in shaped_as.items()
    )


def mean_of_rows(rows: Weights, members: tf.Tensor) -> Weights:
    """Returns the mean of the members' rows, by tensor; zeros where there is no member."""
    share = members / tf.maximum(tf.reduce_sum(members), 1.0)
    return map_weights(lambda value: tf.tensordot(share, _rows_of(members, value), 1), rows)


def _rows_of(members: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns `rows` with zeros in place of the rows of clients that are no members, even where these are NaN."""
    is_member = tf.reshape(members > 0, [-1] + [1] * (rows.shape.rank - 1))
    return tf.where(is_member, rows, tf.zeros([], rows.dtype))
