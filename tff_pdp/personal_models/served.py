"""Converts clients' personal models to the form that is served: shared weights once, all other weights in rows.

To find the shared weights and the clients with equal models, the weights that `personalise` returns are compared, some
clients at a time. If an algorithm makes models from small states, an export may store the states instead of weights.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from serving.export.expectations import MAX_REFERENCES
from serving.models import CLUSTERS, GLOBAL_ROW, HYPERNETWORK, STACKED, Arrays, PersonalModels
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Weights
from tff_pdp.models.derived import SCALE, SHIFT
from tff_pdp.personal_models.trained_clients import TrainedClients, as_arrays, mean_arrays, nbytes
from tff_pdp.training.client_store.states import to_columns


class PersonalRows:
    """The named arrays of a global model and of all clients, stored without duplicate rows.

    An array with the same bits in all models is shared. The other arrays are stacked in rows. Row 0 belongs to the
    global model; clients whose arrays all have the same bits share a row.

    Attributes:
      shared: arrays that are the same in all models, by name.
      rows: int32 `[clients]`, the number of each client's row.
      num_rows: number of rows, including the global model's row.
    """

    def __init__(self, global_arrays: Arrays, num_clients: int, parts: Iterable[Arrays]):
        """Reads the arrays of some clients after another, and adds a row for each client without an equal earlier one.

        Args:
          global_arrays: arrays of the global model, by name.
          num_clients: number of clients.
          parts: arrays of successive clients, stacked along a first axis of clients, by name, with the names, dtypes
            and, but for this axis, shapes of `global_arrays`.

        Raises:
          ValueError: names, shapes or dtypes differ, or the number of clients is not `num_clients`.
        """
        self.shared = {name: np.asarray(array, order="C") for name, array in global_arrays.items()}
        self.rows = np.full(num_clients, GLOBAL_ROW, np.int32)
        self._buffers: dict[str, np.ndarray] = {}
        # Keyed by arrays that differ from the global model, so that equal arrays are compared but never hashed.
        known: dict[bytes, int] = {}
        everything, start = dict(self.shared), 0
        for part in parts:
            own = {name: _like(everything, name, part) for name in {**everything, **part}}
            # By bits, not by value: zeros have a sign.
            different = {name: ~_equal_bits(array, everything[name]) for name, array in own.items()}
            is_own = np.logical_or.reduce(list(different.values()))
            if start + len(is_own) > num_clients:
                raise ValueError(f"there are more clients than {num_clients}")
            first, new = 1 + len(known), []
            for client in np.flatnonzero(is_own).tolist():
                key = _digest(own, different, client)
                if key not in known:
                    known[key] = 1 + len(known)
                    new.append(client)
                self.rows[start + client] = known[key]
            if new:
                self._write(first, own, different, new)
            start += len(is_own)
            # The next part is made while this one is in memory otherwise.
            del part, own
        if start != num_clients:
            raise ValueError(f"there are {start} clients, not {num_clients}")
        self.num_rows = 1 + len(known)

    @property
    def stacked(self) -> dict[str, np.ndarray]:
        """Returns the arrays that are not shared, stacked in rows: `[num_rows, ...]` by name."""
        return {name: buffer[: self.num_rows] for name, buffer in sorted(self._buffers.items())}

    def separate(self) -> None:
        """Copies rows so that each client has a row of its own, in the order of clients; no effect without rows."""
        if not self._buffers:
            return
        # Backwards, in place: a client's row is never behind its new one, since rows are numbered as clients come.
        for client in reversed(range(len(self.rows))):
            for buffer in self._buffers.values():
                buffer[client + 1] = buffer[self.rows[client]]
        self.rows = np.arange(1, len(self.rows) + 1, dtype=np.int32)
        self.num_rows = len(self.rows) + 1

    def _write(self, first: int, own: Arrays, different: Mapping[str, np.ndarray], new: Sequence[int]) -> None:
        """Writes rows, from `first` on, of the clients `new` of a part `own`; `different` says which arrays differ."""
        for name in [name for name, is_different in different.items() if is_different[new].any()]:
            if name not in self._buffers:
                # Pages of the array that are never written take no memory.
                buffer = np.empty([len(self.rows) + 1, *own[name].shape[1:]], own[name].dtype)
                # All earlier rows had the global model's values.
                buffer[:first] = self.shared.pop(name)
                self._buffers[name] = buffer
        for name, buffer in self._buffers.items():
            buffer[first : first + len(new)] = own[name][new]


def _like(expected: Arrays, name: str, arrays: Arrays) -> np.ndarray:
    if name not in expected or name not in arrays:
        raise ValueError(f"{name!r} is not an array of every client and of the global model")
    array = np.asarray(arrays[name], order="C")
    if (array.shape[1:], array.dtype) != (expected[name].shape, expected[name].dtype):
        raise ValueError(
            f"{name!r} is {array.dtype} {array.shape[1:]} for some clients, but {expected[name].dtype} "
            f"{expected[name].shape} for the global model"
        )
    return array


def _equal_bits(stack: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Tells for each member of a stack `[n, ...]` whether it has the bits of `array`: bool `[n]`."""
    size = array.nbytes
    if not size:
        return np.ones(len(stack), bool)
    members = stack.reshape(len(stack), -1).view(np.uint8)
    # Whole members are compared as one value each, without an array as large as the stack.
    return members.view(f"V{size}").ravel() == array.reshape(-1).view(np.uint8).view(f"V{size}")


def _digest(own: Arrays, different: Mapping[str, np.ndarray], client: int) -> bytes:
    """Returns a digest of the names and bits of those of a client's arrays that differ from the global model's."""
    digest = hashlib.blake2b(digest_size=16)
    for name, is_different in different.items():
        if is_different[client]:
            digest.update(f"{name}\n".encode())
            digest.update(own[name][client].reshape(-1).view(np.uint8).data)
    return digest.digest()


AUTO, PER_CLIENT = "auto", "per_client"
# A larger export of few clients is divided into one for each client.
MAX_BYTES_OF_ONE_EXPORT = 2**30
MAX_CLIENTS_OF_OWN_EXPORTS = 100
# First parts of the names of arrays: of the server's broadcast, and of clients' states.
_BROADCAST, _STATE = "broadcast", "client"


@dataclasses.dataclass(frozen=True)
class ServedModels:
    """The personal models to be exported.

    Attributes:
      models: models of all clients.
      layout: layout of the export; where `tff_pdp.experiment.config.Export.layout` is `auto`, the chosen layout.
      sizes: approximate number of bytes of all weights, by possible layout.
      references: weights of the global model (id "") and of some clients, by id, as the algorithm itself computes them;
        the export's answers are compared with the model's answers for these weights.
    """

    models: PersonalModels
    layout: str
    sizes: Mapping[str, int]
    references: Mapping[str, Arrays]


def served_models(trained: TrainedClients, layout: str = AUTO) -> ServedModels:
    """Converts trained clients' models to the form that is served; runs in an engine, some clients at a time.

    Args:
      trained: the clients.
      layout: as in `tff_pdp.experiment.config.Export`. `auto` chooses the smallest layout that has one export for all
        clients; `clusters` is considered only if it at least halves the number of rows. If the smallest layout exceeds
        `MAX_BYTES_OF_ONE_EXPORT` and there are at most `MAX_CLIENTS_OF_OWN_EXPORTS` clients, `auto` makes one export
        per client.

    Raises:
      ConfigError: the layout is not possible for this algorithm.
    """
    num_clients, is_small = len(trained.client_ids), trained.algorithm.export.served_from_state
    if layout == HYPERNETWORK and not is_small:
        raise ConfigError(
            f"export.layout {HYPERNETWORK}: {trained.algorithm.name} does not make models from small states; write auto"
        )
    global_weights = trained.served_global_weights(is_divided=layout == PER_CLIENT)
    model_bytes = nbytes(global_weights)
    sizes = {PER_CLIENT: num_clients * model_bytes}
    if is_small:
        states = from_states(trained)
        # Every generated weight differs, so the size is known without the weights.
        sizes |= {HYPERNETWORK: states.nbytes, STACKED: (1 + num_clients) * model_bytes}
        if _choice(layout, sizes, num_clients) == HYPERNETWORK:
            return ServedModels(states, HYPERNETWORK, sizes, _references(trained, global_weights))
        del states
    references: dict[str, Arrays] = {"": global_weights}
    rows = PersonalRows(global_weights, num_clients, _noting(trained, references))
    shared, row = nbytes(rows.shared), nbytes({name: stack[0] for name, stack in rows.stacked.items()})
    sizes |= {STACKED: shared + (1 + num_clients) * row, CLUSTERS: shared + rows.num_rows * row}
    possible = [CLUSTERS, PER_CLIENT] if _are_worth_sharing(rows) else [STACKED, PER_CLIENT]
    chosen = _choice(layout, {name: sizes[name] for name in possible}, num_clients)
    if chosen == PER_CLIENT and layout == AUTO and trained.global_weights is None:
        # Rows have a global model that must not be in every client's file.
        del rows, references
        return served_models(trained, PER_CLIENT)
    form = CLUSTERS if chosen == CLUSTERS or (chosen == PER_CLIENT and CLUSTERS in possible) else STACKED
    if form == STACKED:
        rows.separate()
    models = PersonalModels(trained.served_model, trained.client_ids, rows.rows, rows.shared, rows.stacked, layout=form)
    return ServedModels(models, chosen, sizes, references)


def from_states(trained: TrainedClients) -> PersonalModels:
    """Returns models that are made from small states: the broadcast is shared, and clients' states are the rows.

    Row 0, for the global model, is the state of a client that has not taken part yet.
    """
    algorithm = trained.algorithm
    message = algorithm.broadcast(trained.server_state)
    first = algorithm.init_client(message)

    def own_arrays() -> Iterator[Arrays]:
        for numbers, states in trained.parts():
            yield {**trained.scalings_of(numbers), **_flat(to_columns(states), _STATE)}

    rows = PersonalRows(
        {**mean_arrays(trained.scalings), **_flat(first, _STATE)}, len(trained.client_ids), own_arrays()
    )
    if not _are_worth_sharing(rows):
        rows.separate()
    return PersonalModels(
        trained.served_model,
        trained.client_ids,
        rows.rows,
        {**_flat(message, _BROADCAST), **rows.shared},
        rows.stacked,
        weights_from_states(algorithm, message, first, is_scaled=bool(trained.scalings)),
        HYPERNETWORK,
    )


def weights_from_states(
    algorithm: Algorithm, message: Any, state: Any, *, is_scaled: bool
) -> Callable[[Weights, Weights], Weights]:
    """Returns the function `PersonalModels.make_weights` for the models of `from_states`.

    `message` is any broadcast, and `state` any client's state: both show only the structure. `is_scaled` says whether
    clients have input scalings.
    """
    scaling_names = (SHIFT, SCALE) if is_scaled else ()

    def make_weights(shared: Weights, own: Weights) -> Weights:
        # The values decide whether an array is in `shared` or in `own`: a state that nobody changed is shared.
        arrays = {name: tf.convert_to_tensor(array) for name, array in {**shared, **own}.items()}
        weights = algorithm.personalise(_nested(message, _BROADCAST, arrays), _nested(state, _STATE, arrays))
        return {**{name: arrays[name] for name in scaling_names}, **weights}

    return make_weights


def _choice(layout: str, sizes: Mapping[str, int], num_clients: int) -> str:
    """Returns the layout or, for `auto`, the smallest in `sizes`, or `PER_CLIENT` if the smallest is too large."""
    if layout != AUTO:
        return layout
    smallest = min((name for name in sizes if name != PER_CLIENT), key=sizes.__getitem__)
    is_divided = sizes[smallest] > MAX_BYTES_OF_ONE_EXPORT and num_clients <= MAX_CLIENTS_OF_OWN_EXPORTS
    return PER_CLIENT if is_divided else smallest


def _are_worth_sharing(rows: PersonalRows) -> bool:
    """Tells whether the number of different rows is at most half the number of clients and the global model."""
    return 2 * rows.num_rows <= 1 + len(rows.rows)


def _noting(trained: TrainedClients, references: dict[str, Arrays]) -> Iterator[Arrays]:
    """Yields clients' weights in stacks, and copies those of some clients into `references`."""
    chosen = np.array(_reference_numbers(trained), np.int64)
    for numbers, weights in trained.weight_stacks():
        for place in np.flatnonzero(np.isin(numbers, chosen)):
            client_id = trained.client_ids[int(numbers[place])]
            references[client_id] = {name: np.array(stack[place]) for name, stack in weights.items()}
        yield weights
        del weights


def _references(trained: TrainedClients, global_weights: Arrays) -> dict[str, Arrays]:
    """Returns the references that `_noting` collects, without computing the other clients' weights."""
    references: dict[str, Arrays] = {"": global_weights}
    if numbers := _reference_numbers(trained):
        weights = trained.personalise(trained.ready_states(np.array(numbers)))
        for number, own in zip(numbers, weights, strict=True):
            references[trained.client_ids[number]] = {**trained.scaling(number), **as_arrays(own)}
    return references


def _reference_numbers(trained: TrainedClients) -> list[int]:
    """Returns the numbers of some clients, spread evenly over all clients."""
    last, count = len(trained.client_ids) - 1, trained.clients_in_memory(MAX_REFERENCES)
    return sorted(set(np.linspace(0, last, count).astype(int).tolist())) if last >= 0 else []


def _flat(state: Any, name: str) -> dict[str, np.ndarray]:
    """Returns the leaves of a nest by name: `name` and the keys of the leaf, joined by slashes."""
    if isinstance(state, Mapping):
        return {path: leaf for key, inner in state.items() for path, leaf in _flat(inner, f"{name}/{key}").items()}
    return {name: np.asarray(state)}


def _nested(like: Any, name: str, arrays: Mapping[str, Any]) -> Any:
    """Returns the nest, of the form of `like`, that `_flat` turned into `arrays`."""
    if isinstance(like, Mapping):
        return {key: _nested(inner, f"{name}/{key}", arrays) for key, inner in like.items()}
    return arrays[name]
