"""Trained clients -> their personal models in the form they are served in.

What is served is what `personalise` returns. Which weights are shared, and which clients have the same model, is read
off these weights; only where models are made from small states may the states be held in their place.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from serving.export.expectations import MAX_REFERENCES
from serving.models import CLUSTERS, HYPERNETWORK, STACKED, Arrays, PersonalModels
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.method import Method
from tff_pdp.models.base import Weights
from tff_pdp.models.scaled_inputs import SCALE, SHIFT
from tff_pdp.personal_models.trained_clients import TrainedClients, as_arrays, mean_arrays, nbytes, trained_clients
from tff_pdp.runtime.personal_rows import PersonalRows

AUTO, PER_CLIENT = "auto", "per_client"
# One export up to here; larger ones of few clients are divided.
MAX_BYTES_OF_ONE_EXPORT = 2**30
MAX_CLIENTS_OF_OWN_EXPORTS = 100


@dataclasses.dataclass(frozen=True)
class ServedModels:
    """Personal models to be exported.

    Attributes:
      models: of all clients.
      layout: of `tff_pdp.config.EXPORT_LAYOUTS`, never `auto`.
      sizes: about how many bytes each possible layout takes.
      references: weights of the global model, by the id "", and of some clients, as `personalise` returned them: what
        the export must answer like.
    """

    models: PersonalModels
    layout: str
    sizes: Mapping[str, int]
    references: Mapping[str, Arrays]


def served_models(
    method: Method, state: Any, *, model_seed: int = 0, layout: str = AUTO, exported_id: Callable[[str], str] = str
) -> ServedModels:
    """Returns what is served of a trained method. Needs an engine.

    Args:
      method: what was trained.
      state: after the last round.
      model_seed: of the initial weights.
      layout: of `tff_pdp.config.EXPORT_LAYOUTS`.
      exported_id: what an export has in place of a client's id.

    Raises:
      ConfigError: the layout is not possible for this method.
    """
    return build_served_models(trained_clients(method, state, model_seed, exported_id), layout)


def build_served_models(trained: TrainedClients, layout: str = AUTO) -> ServedModels:
    """Returns what is served of trained clients. Needs an engine.

    Memory is that of the result, of a part of the clients, and of the references.

    Args:
      trained: the clients.
      layout: of `tff_pdp.config.EXPORT_LAYOUTS`. `auto` is the smallest that is one export; `clusters` counts only
        where it at least halves the rows. An export for every client is chosen only where one of all would exceed
        `MAX_BYTES_OF_ONE_EXPORT`, of `MAX_CLIENTS_OF_OWN_EXPORTS` at most.

    Raises:
      ConfigError: the layout is not possible for this algorithm.
    """
    num_clients, is_small = len(trained.client_ids), trained.algorithm.served_from_state
    if layout == HYPERNETWORK and not is_small:
        raise ConfigError(
            f"export.layout {HYPERNETWORK}: {trained.algorithm.name} does not make models from small states; write auto"
        )
    global_weights = trained.served_global_weights(is_divided=layout == PER_CLIENT)
    model_bytes = nbytes(global_weights)
    sizes = {PER_CLIENT: num_clients * model_bytes}
    if is_small:
        states = from_states(trained)
        # Every generated weight differs, so that the size is known without the weights.
        sizes |= {HYPERNETWORK: states.nbytes, STACKED: (1 + num_clients) * model_bytes}
        if _choice(layout, sizes, num_clients) == HYPERNETWORK:
            return ServedModels(states, HYPERNETWORK, sizes, _references(trained, global_weights))
        del states
    references: dict[str, Arrays] = {"": global_weights}
    rows = PersonalRows(global_weights, num_clients, _noting(trained, references))
    shared, row = rows.nbytes_of_shared, rows.nbytes_of_row
    sizes |= {STACKED: shared + (1 + num_clients) * row, CLUSTERS: shared + rows.num_rows * row}
    possible = [CLUSTERS, PER_CLIENT] if _are_worth_sharing(rows) else [STACKED, PER_CLIENT]
    chosen = _choice(layout, {name: sizes[name] for name in possible}, num_clients)
    if chosen == PER_CLIENT and layout == AUTO and trained.global_weights is None:
        # Rows were built around a global model that must not be in every client's file.
        del rows, references
        return build_served_models(trained, PER_CLIENT)
    form = CLUSTERS if chosen == CLUSTERS or (chosen == PER_CLIENT and CLUSTERS in possible) else STACKED
    if form == STACKED:
        rows.separate()
    models = PersonalModels(trained.served_model, trained.client_ids, rows.rows, rows.shared, rows.stacked, layout=form)
    return ServedModels(models, chosen, sizes, references)


def from_states(trained: TrainedClients) -> PersonalModels:
    """Models as the states they are made from: what the server broadcasts is shared, clients' states are rows.

    Row 0 is the state of a client that has not taken part yet.
    """
    algorithm = trained.algorithm
    message = algorithm.broadcast(trained.server_state)
    first = algorithm.init_client(message)
    message_names, state_names = _names(message, "broadcast"), _names(first, "client")

    def own_arrays() -> Iterator[Arrays]:
        for numbers, states in trained.parts():
            for number, state in zip(numbers, states, strict=True):
                yield {**trained.scaling(number), **_flat(state, state_names)}

    rows = PersonalRows(
        {**mean_arrays(trained.scalings), **_flat(first, state_names)}, len(trained.client_ids), own_arrays()
    )
    if not _are_worth_sharing(rows):
        rows.separate()
    scaling_names = (SHIFT, SCALE) if trained.scalings else ()

    def make_weights(shared: Weights, own: Weights) -> Weights:
        # Which of the two has a name depends on the values: a state that nobody changed is shared.
        arrays = {name: tf.convert_to_tensor(array) for name, array in {**shared, **own}.items()}
        weights = algorithm.personalise(_nested(message_names, arrays), _nested(state_names, arrays))
        return {**{name: arrays[name] for name in scaling_names}, **weights}

    return PersonalModels(
        trained.served_model,
        trained.client_ids,
        rows.rows,
        {**_flat(message, message_names), **rows.shared},
        rows.stacked,
        make_weights=make_weights,
        layout=HYPERNETWORK,
    )


def _choice(layout: str, sizes: Mapping[str, int], num_clients: int) -> str:
    """The layout, or the smallest of these, or an export for every client where that is too large."""
    if layout != AUTO:
        return layout
    smallest = min((name for name in sizes if name != PER_CLIENT), key=sizes.__getitem__)
    is_divided = sizes[smallest] > MAX_BYTES_OF_ONE_EXPORT and num_clients <= MAX_CLIENTS_OF_OWN_EXPORTS
    return PER_CLIENT if is_divided else smallest


def _are_worth_sharing(rows: PersonalRows) -> bool:
    """Whether clients with the same model are so many that rows for different models alone are half as many."""
    return 2 * rows.num_rows <= 1 + len(rows.rows)


def _noting(trained: TrainedClients, references: dict[str, Arrays]) -> Iterator[Arrays]:
    """Each client's weights; those of some are copied into `references` on their way."""
    chosen = set(_reference_numbers(trained))
    for number, weights in enumerate(trained.weights()):
        if number in chosen:
            references[trained.client_ids[number]] = {name: np.array(array) for name, array in weights.items()}
        yield weights


def _references(trained: TrainedClients, global_weights: Arrays) -> dict[str, Arrays]:
    """What `_noting` notes, where the other clients' weights are not needed."""
    references: dict[str, Arrays] = {"": global_weights}
    if numbers := _reference_numbers(trained):
        weights = trained.personalise(trained.ready_states(np.array(numbers)))
        for number, own in zip(numbers, weights, strict=True):
            references[trained.client_ids[number]] = {**trained.scaling(number), **as_arrays(own)}
    return references


def _reference_numbers(trained: TrainedClients) -> list[int]:
    """Numbers of some clients, spread over all."""
    last, count = len(trained.client_ids) - 1, trained.clients_in_memory(MAX_REFERENCES)
    return sorted(set(np.linspace(0, last, count).astype(int).tolist())) if last >= 0 else []


def _names(state: Any, prefix: str) -> Any:
    """The nest with each leaf replaced by its name, the keys on the way to it."""
    if isinstance(state, Mapping):
        return {key: _names(value, f"{prefix}/{key}") for key, value in state.items()}
    return prefix


def _flat(state: Any, names: Any) -> dict[str, np.ndarray]:
    """The leaves by name."""
    if isinstance(names, Mapping):
        return {name: leaf for key, inner in names.items() for name, leaf in _flat(state[key], inner).items()}
    return {names: np.asarray(state)}


def _nested(names: Any, arrays: Mapping[str, Any]) -> Any:
    """The inverse of `_flat`."""
    if isinstance(names, Mapping):
        return {key: _nested(inner, arrays) for key, inner in names.items()}
    return arrays[names]
