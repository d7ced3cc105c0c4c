"""Makes a run's first state, and runs single rounds: a round charges the ledger, then trains the cohort."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import Observed
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.run_key import ADAPTATION, RunKey
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.client_store.state_files import StateFiles
from tff_pdp.training.client_store.states import (
    MemoryStore,
    is_store,
    places_in_parts,
    replace_columns,
    replace_states,
    select_states,
    to_columns,
)
from tff_pdp.training.client_store.store import ClientStore
from tff_pdp.training.record.charges import Attempt

# Number of users that are evaluated together; memory grows with this number.
_CLIENTS_AT_A_TIME = 512


def first_state(
    method: Method, test_only_seed: int | None, store_folder: Path | None = None, states_root: str = ""
) -> Checkpoint:
    """Returns a new run's state before its first round, with a new run key. Needs an engine.

    `test_only_seed`, unless None, fixes the key. States of users, and of all clients at workers, are stored in
    `store_folder`; None for memory. `states_root` is as in `StateFiles.create`.

    Raises:
      BudgetError: the planned rounds would overspend a silo's budget.
    """
    server_state = method.process.initialize()
    client_state = method.process.init_client(server_state)
    client_ids = tuple(method.clients.client_ids)
    run_key = RunKey.from_entropy() if test_only_seed is None else RunKey.from_test_seed(test_only_seed)
    client_states: Any = [client_state] * len(client_ids)
    if method.is_at_workers and store_folder is not None:
        own = tf.nest.map_structure(np.asarray, client_state)
        client_states = StateFiles.create(store_folder, own, len(client_ids), root=states_root)
    elif method.plan.samples_clients:
        own = tf.nest.map_structure(np.asarray, client_state)
        client_states = (
            MemoryStore(own, len(client_ids))
            if store_folder is None
            else ClientStore.create(store_folder, own, len(client_ids))
        )
    return Checkpoint(
        round_number=0,
        server_state=method.plan.start(server_state, run_key.server_seeds()),
        client_ids=client_ids,
        client_states=client_states,
        ledger=method.plan.build_ledger(),
        run_key=run_key,
        config_hash=run_key.keyed(method.config_hash),
        hook=method.hook.init() if method.hook else {},
    )


def redrawn(method: Method, state: Checkpoint, attempt: Attempt) -> Checkpoint:
    """Returns the state for a new attempt, whose rounds have new random draws. Needs an engine.

    Raises:
      ConfigError: later rounds depend on noise or a clip norm of earlier rounds, and cannot be drawn anew.
    """
    method.plan.check_redrawn(state.round_number)
    run_key = dataclasses.replace(state.run_key, attempt=attempt.number, salt=attempt.salt)
    first = method.plan.start(method.process.initialize(), run_key.server_seeds())
    server_state = {**state.server_state, "aggregation": first["aggregation"]}
    return dataclasses.replace(
        state,
        server_state=server_state,
        run_key=run_key,
        ledger=attempt.ledger,
        # A run that goes on after its end may have other settings.
        config_hash=run_key.keyed(method.config_hash),
    )


def run_round(method: Method, state: Checkpoint, round_number: int, data: Examples | ClientValues) -> Checkpoint:
    """Charges one round to the ledger, runs the round, and returns the new state. Needs an engine.

    `data` are the examples of `method.at(round_number)`. Clients outside the round's cohort keep their states. If the
    method has a hook, the hook sets hyper-parameters before the round and is updated with the result of the round.

    Raises:
      BudgetError: a scope (a silo, or all users) would overspend; nothing was run.
    """
    if state.ledger is not None:
        method.plan.charge_round(state.ledger, round_number)
    method = method.at(round_number)
    cohort = method.plan.cohort(round_number, state.client_ids, state.run_key.cohort_generator)
    is_everyone = len(cohort) == len(state.client_ids)
    if not len(cohort):
        server_state = method.plan.round_of_nobody(method.process, state.server_state)
        if is_store(state.client_states):
            # A store that is a round behind would look like an older copy.
            nobody = state.client_states.read([])
            state = dataclasses.replace(
                state, client_states=replace_columns(state.client_states, round_number, [], nobody)
            )
        return dataclasses.replace(state, round_number=round_number, server_state=server_state)
    changed = method.hook.hparams(state.hook, cohort) if method.hook else {}
    params = method.client_params(state.run_key, round_number, cohort, changed=changed)
    own_data = data if is_everyone and isinstance(data, ClientValues) else data.select(cohort)
    own_states = select_states(state.client_states, cohort, method.client_state_type)
    server_state, new_states, _ = method.process.next(state.server_state, own_states, own_data, params)
    client_states = replace_states(state.client_states, round_number, cohort, new_states)
    after = dataclasses.replace(
        state, round_number=round_number, server_state=server_state, client_states=client_states
    )
    if method.hook is None:
        return after
    return dataclasses.replace(after, hook=method.hook.after(state.hook, _observed(state), _observed(after)))


def warning_of(method: Method, state: Checkpoint) -> str:
    """Returns the method's warning about a training, from the state after a round; empty without a warning."""
    algorithm = method.at(state.round_number).algorithm
    return algorithm.warning(state.server_state["algorithm"]) if algorithm.warning else ""


def calls_of_evaluation(state: Checkpoint) -> int:
    """Returns the number of calls in which clients are evaluated: one for each part of `ready_states`."""
    if not is_store(state.client_states):
        return 1
    return sum(1 for _ in places_in_parts(len(state.client_ids), _CLIENTS_AT_A_TIME))


def ready_states(
    method: Method, state: Checkpoint, train_data: Examples | ClientValues | None
) -> Iterator[tuple[np.ndarray, Sequence[Any]]]:
    """Yields clients' states, ready for predictions, in parts `(places, states)`. Needs an engine.

    Places are positions in `state.client_ids`. If users adapt (`Algorithm.adapt`), copies of their states are adapted.
    """
    if not is_store(state.client_states):
        yield np.arange(len(state.client_ids)), state.client_states
        return
    for places in places_in_parts(len(state.client_ids), _CLIENTS_AT_A_TIME):
        yield places, ready_states_of(method, state, places, train_data)


def ready_states_of(
    method: Method, state: Checkpoint, places: np.ndarray, train_data: Examples | ClientValues | None
) -> Sequence[Any]:
    """Returns states, ready for predictions, of the clients at `places`, in that order. Needs an engine."""
    states = select_states(state.client_states, places, method.client_state_type)
    if method.process.adapt is None:
        return states
    if train_data is None:
        raise ValueError(f"{method.algorithm.name} adapts to training examples: pass them as `train_data`")
    params = method.client_params(state.run_key, max(state.round_number, 1), places, run=ADAPTATION)
    return method.process.adapt(state.server_state, states, train_data.select(places), params)


def client_metrics(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """Returns clients' exact `personal` and `global` metrics on `data`; not private. Needs an engine.

    Each metric is an array `[clients]`, in the order of `state.client_ids`. The model's own metric has the key
    `example_name` of the metric. The value is NaN for a client without examples; a ranking metric is also NaN for a
    client without positive examples. `train_data` has training examples, for users that adapt before predictions.
    """
    parts = []
    for places, states in ready_states(method, state, train_data):
        own_data = data if isinstance(data, ClientValues) else data.select(places)
        parts.append(to_columns(method.process.evaluate(state.server_state, states, own_data)))
    return tf.nest.map_structure(lambda *columns: np.concatenate(columns), *parts)


def evaluate_clients(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> dict[str, Mapping[str, Any]]:
    """Returns the metrics of `client_metrics` by client id: for `personal` and `global`, each metric by its name."""
    columns = client_metrics(method, state, data, train_data)
    return {
        client_id: {kind: {name: column[place] for name, column in own.items()} for kind, own in columns.items()}
        for place, client_id in enumerate(state.client_ids)
    }


def _observed(state: Checkpoint) -> Observed:
    """Returns what a hook sees: client states as columns, each leaf with a first axis of clients."""
    return Observed(state.round_number, state.server_state["algorithm"], to_columns(state.client_states))
