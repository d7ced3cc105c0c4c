"""Reads the states and weights of a trained method's clients, some clients at a time."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from serving.models import Arrays
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.experiment.method import Method
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.derived import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.training.client_store.states import places_in_parts, to_columns
from tff_pdp.training.rounds import ready_states_of

SHARED, INITIAL, MEAN = "the global model", "the untrained initial model", "the mean of the clients' personal models"
# Limits on the full models of clients that are personalised together.
_BYTES_AT_A_TIME = 2**28
_CLIENTS_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True)
class TrainedClients:
    """The clients of a trained method, with everything that their models are computed from.

    Attributes:
      model: the model that was trained, without a scaling of inputs.
      algorithm: algorithm that trained the model.
      server_state: the server's state in the algorithm.
      client_ids: ids that the clients have in the export.
      ready_states: function from positions in `client_ids` to the states of these clients, in the given order; if the
        algorithm has `adapt`, the states after `adapt`.
      personalise: function from clients' states to the weights of each of these clients' models.
      global_weights: weights of the model for unknown clients; None if that model is the mean of the clients' models
        or, where the mean would reveal a client's model, the initial model.
      scalings: arrays `input/shift` and `input/scale` of each client; empty if inputs are not scaled.
      model_seed: seed of the initial model.
    """

    model: Model
    algorithm: Algorithm
    server_state: Any
    client_ids: Sequence[str]
    ready_states: Callable[[np.ndarray], Sequence[Any]]
    personalise: Callable[[Sequence[Any]], Sequence[Weights]]
    global_weights: Arrays | None
    scalings: Sequence[Arrays] = ()
    model_seed: int = 0

    @property
    def served_model(self) -> Model:
        """Returns the model that is served, which takes raw examples and does the scaling of inputs, if any."""
        return with_scaled_inputs(self.model) if self.scalings else self.model

    def parts(self) -> Iterator[tuple[np.ndarray, Sequence[Any]]]:
        """Yields positions and states of clients, some clients at a time, so that their models fit into memory."""
        for numbers in places_in_parts(len(self.client_ids), self.clients_in_memory(_CLIENTS_AT_A_TIME)):
            yield numbers, self.ready_states(numbers)

    def clients_in_memory(self, at_most: int) -> int:
        """Returns the number of clients' models that may be in memory at a time: from 1 to `at_most`."""
        return int(np.clip(_BYTES_AT_A_TIME // nbytes(self.model.init(0)), 1, at_most))

    def weight_stacks(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yields positions of some clients, int64 `[n]`, and the weights of their served models: `[n, ...]` by name.

        Copy or drop the arrays before asking for the next.
        """
        for numbers, states in self.parts():
            yield numbers, {**self.scalings_of(numbers), **as_arrays(to_columns(self.personalise(states)))}

    def weights(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the weights of each client's served model; copy or drop the arrays before asking for the next."""
        for numbers, stacks in self.weight_stacks():
            for place in range(len(numbers)):
                yield {name: stack[place] for name, stack in stacks.items()}

    def weights_by_id(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the weights that `weights` yields, for all clients at once, by client id."""
        return {
            client_id: {name: np.array(array) for name, array in weights.items()}
            for client_id, weights in zip(self.client_ids, self.weights(), strict=True)
        }

    def scaling(self, number: int) -> Arrays:
        """Returns `input/shift` and `input/scale` of the client at position `number`; empty without scaling."""
        return self.scalings[number] if self.scalings else {}

    def scalings_of(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `input/shift` and `input/scale` of the clients at positions `numbers`, stacked; empty without any."""
        if not self.scalings:
            return {}
        return {name: np.stack([self.scalings[number][name] for number in numbers]) for name in self.scalings[0]}

    def served_global_weights(self, *, is_divided: bool = False) -> dict[str, np.ndarray]:
        """Returns the served model's weights for unknown clients; input scalings are the mean of the clients' scalings.

        With `is_divided`, each client gets a file of its own, which also contains these weights. In place of the mean
        of the clients' models, the file then has the initial model, whose inputs are not scaled: from the mean of two
        clients' models, each of the two could compute the other's weights.
        """
        if self.global_weights is None:
            return dict(self.served_model.init(self.model_seed)) if is_divided else mean_arrays(self.weights())
        return {**mean_arrays(self.scalings), **as_arrays(self.global_weights)}


def trained_clients(
    method: Method, state: Any, model_seed: int = 0, exported_id: Callable[[str], str] = str
) -> TrainedClients:
    """Returns a method's clients, sorted by id in the export: the data set's order would reveal who is who.

    `state` is the state after the last round. `model_seed` is the seed of the initial weights. `exported_id` is a
    function from a client's id to the id in the export.
    """
    exported = [exported_id(client_id) for client_id in state.client_ids]
    places = np.array(sorted(range(len(exported)), key=exported.__getitem__), np.int64)
    train_data = method.examples("train") if method.process.adapt is not None else None
    scalings = [method.scalings[state.client_ids[place]] for place in places] if method.scalings else []
    return TrainedClients(
        model=method.model,
        algorithm=method.algorithm,
        server_state=state.server_state["algorithm"],
        client_ids=[exported[place] for place in places],
        ready_states=lambda numbers: ready_states_of(method, state, places[numbers], train_data),
        personalise=lambda states: method.process.personalise(state.server_state, states),
        global_weights=_global_weights(method, state, model_seed),
        scalings=[{SHIFT: own.shift, SCALE: own.scale} for own in scalings],
        model_seed=model_seed,
    )


def global_model_of(method: Method, *, is_divided: bool = False) -> str:
    """Returns the kind of model for unknown clients: `SHARED` or, without a global model, `INITIAL` or `MEAN`.

    `is_divided` says whether each client gets a file of its own.

    Guarantee: this model reveals no more about anyone than the releases of training do.
    """
    if method.algorithm.global_model is not None:
        return SHARED
    # Personal models of users have no noise, nor would their mean. Each silo's model is private for the silo's records,
    # so the mean of silos' models is post-processing.
    return INITIAL if method.plan.samples_clients or is_divided else MEAN


def _global_weights(method: Method, state: Any, model_seed: int) -> Arrays | None:
    """Returns the weights of `global_model_of`; None for the mean of clients' weights."""
    kind = global_model_of(method)
    if kind == SHARED:
        assert method.algorithm.global_model is not None
        return method.algorithm.global_model(state.server_state["algorithm"])
    return method.model.init(model_seed) if kind == INITIAL else None


def mean_arrays(clients: Iterable[Arrays]) -> dict[str, np.ndarray]:
    """Returns the mean of each named array over the clients; without clients, no arrays.

    If all clients have the same float32 array, the mean is bit-identical to that array.
    """
    sums: dict[str, np.ndarray] = {}
    dtypes: dict[str, np.dtype] = {}
    count = 0
    for arrays in clients:
        count += 1
        for name, array in arrays.items():
            wide = array.astype(np.float64)
            sums[name] = sums[name] + wide if name in sums else wide
            dtypes[name] = array.dtype
    return {name: (total / count).astype(dtypes[name]) for name, total in sums.items()}


def as_arrays(weights: Weights) -> dict[str, np.ndarray]:
    """Returns weights as NumPy arrays; weights in this machine's main memory are not copied."""
    return {name: np.asarray(array) for name, array in weights.items()}


def nbytes(arrays: Arrays) -> int:
    """Returns the number of bytes of all arrays together."""
    return sum(np.asarray(array).nbytes for array in arrays.values())
