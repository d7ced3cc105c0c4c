"""Defines the form in which all clients' models are served: shared arrays are held once, clients' own are stacked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import Model, Weights

Arrays = Mapping[str, np.ndarray]

GLOBAL_ROW = 0
# How weights are laid out in a SavedModel; `docs/serving.md` has the sizes and speeds.
STACKED, CLUSTERS, HYPERNETWORK = "stacked", "clusters", "hypernetwork"


@dataclasses.dataclass(frozen=True)
class PersonalModels:
    """The models of all clients, and the global model for unknown clients.

    Client number `i` owns row `rows[i]` of every stack; several clients may own the same row. The weights of a row's
    model are `make_weights(shared, {name: stack[row]})`. Row 0 belongs to the global model.

    Attributes:
      model: the model that every client runs.
      client_ids: ids of the clients in requests, all different.
      rows: int32 `[clients]`, the row of each client.
      shared: arrays that all models have in common, by name.
      stacked: arrays `[rows, ...]` by name, with one row for every model; the global model's row is the first.
      make_weights: function `(shared, own) -> weights of the model` in TensorFlow operations, for a hypernetwork
        `(parameters, descriptor) -> weights`; None if the weights are the arrays of `shared` and `stacked` themselves.
      layout: `stacked`, `clusters` (several clients may own a row) or `hypernetwork` (weights are made from rows).
    """

    model: Model
    client_ids: Sequence[str]
    rows: np.ndarray
    shared: Arrays
    stacked: Arrays
    make_weights: Callable[[Weights, Weights], Weights] | None = None
    layout: str = STACKED

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of every stack, the global model's included."""
        return next((len(stack) for stack in self.stacked.values()), 1)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all arrays, about the size of an export on disk and, once it is loaded, in memory."""
        return sum(array.nbytes for array in (*self.shared.values(), *self.stacked.values()))

    @property
    def values_per_client(self) -> int:
        """Returns the number of values that one row has in all stacks together."""
        return sum(int(np.prod(stack.shape[1:], dtype=np.int64)) for stack in self.stacked.values())

    def weights_of_row(self, row: int) -> Weights:
        """Returns the weights of a row's model, by name: arrays, or eager tensors if `make_weights` makes them."""
        return self.weights_of({name: stack[row] for name, stack in self.stacked.items()})

    def weights_of(self, own: Arrays) -> Weights:
        """Returns the same as `weights_of_row` for a given row, `own`, which need not be in the stacks."""
        if self.make_weights is None:
            return {**self.shared, **own}
        shared = {name: tf.convert_to_tensor(array) for name, array in self.shared.items()}
        return self.make_weights(shared, {name: tf.convert_to_tensor(array) for name, array in own.items()})
