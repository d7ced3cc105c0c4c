"""Defines the weights to serve: arrays that all clients share, and stacked arrays with a row for each model."""

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

    Each array in `stacked` is a stack of rows, with one row for each model. Row 0 belongs to the global model. Client
    `client_ids[i]` owns row `rows[i]` of every stack; several clients may own the same row. The model of a row has the
    weights `make_weights(shared, own)`, where `own` has this row of every stack.

    Attributes:
      model: functions of the model, without weights, the same for every client.
      client_ids: clients' ids, as requests name clients; all ids are different.
      rows: number of each client's row in the stacks, int32 `[clients]`.
      shared: arrays that all models have in common, by name.
      stacked: stacks `[rows, *weight_shape]` by name, with one row for each model; the global model's row is first.
      make_weights: function `(shared, own) -> weights` of TensorFlow operations, such as a hypernetwork with arguments
        `(parameters, descriptor)`; None if the arrays in `shared` and `own` are the weights themselves.
      layout: `stacked`, `clusters` (several clients may own a row) or `hypernetwork` (`make_weights` computes weights).
      class_names: name of each class, in the order of the labels; None if classes have numbers only.
    """

    model: Model
    client_ids: Sequence[str]
    rows: np.ndarray
    shared: Arrays
    stacked: Arrays
    make_weights: Callable[[Weights, Weights], Weights] | None = None
    layout: str = STACKED
    class_names: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the text for each class in answers: its name or, without names, its number."""
        return self.class_names or tuple(map(str, range(self.model.num_classes)))

    @property
    def num_rows(self) -> int:
        """Returns the number of rows in each stack, including the global model's row."""
        return next((len(stack) for stack in self.stacked.values()), 1)

    @property
    def nbytes(self) -> int:
        """Returns the size of all arrays in bytes: about the size of an export on disk and in a server's memory."""
        return sum(array.nbytes for array in (*self.shared.values(), *self.stacked.values()))

    @property
    def values_per_client(self) -> int:
        """Returns the number of values in one row, summed over all stacks."""
        return sum(int(np.prod(stack.shape[1:], dtype=np.int64)) for stack in self.stacked.values())

    def weights_of_row(self, row: int) -> Weights:
        """Returns the weights of one row's model, by name: arrays, or eager tensors if there is a `make_weights`."""
        return self.weights_of({name: stack[row] for name, stack in self.stacked.items()})

    def weights_of(self, own: Arrays) -> Weights:
        """Returns the weights, by name, of a model with the row `own` (arrays by stack name); the row may be new."""
        if self.make_weights is None:
            return {**self.shared, **own}
        shared = {name: tf.convert_to_tensor(array) for name, array in self.shared.items()}
        return self.make_weights(shared, {name: tf.convert_to_tensor(array) for name, array in own.items()})
