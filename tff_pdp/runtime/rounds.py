"""A run's first state, and each after it: charge the ledger, train the silos that take part, keep the others."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.algorithms import auto_prox
from tff_pdp.algorithms.auto_prox_parameters import SiloParameters
from tff_pdp.runtime.checkpoint import Checkpoint
from tff_pdp.runtime.client_values import ClientValues
from tff_pdp.runtime.experiment import Method
from tff_pdp.runtime.run_key import RunKey


def first_state(method: Method, test_only_seed: int | None) -> Checkpoint:
    """The state before the first round, under a new key. Needs an engine.

    Raises:
      BudgetError: the planned rounds would overspend a silo's budget.
    """
    server_state = method.process.initialize()
    client_state = method.process.init_client(server_state)
    client_ids = tuple(method.clients.client_ids)
    return Checkpoint(
        round_number=0,
        server_state=server_state,
        client_ids=client_ids,
        client_states=[client_state] * len(client_ids),
        ledger=method.plan.build_ledger(),
        run_key=RunKey.from_entropy() if test_only_seed is None else RunKey.from_test_seed(test_only_seed),
        config_hash=method.config_hash,
        auto_prox=auto_prox.init(method.auto_prox, method.model.num_parameters()) if method.auto_prox else {},
    )


def run_round(method: Method, state: Checkpoint, round_number: int, data: ClientValues) -> Checkpoint:
    """Charges one round to the ledger, runs it, and returns the state after it. Needs an engine.

    A silo whose last round is over is not asked, and keeps its state. Where lambda is set during training, the server
    learns from what silos release in this round.

    Raises:
      BudgetError: a silo would overspend; nothing was run.
    """
    if state.ledger is not None:
        method.plan.charge_round(state.ledger, round_number)
    changed = {"prox_weight": auto_prox.prox_weights(state.auto_prox)} if method.auto_prox else {}
    params = method.client_params(state.run_key, round_number, changed=changed)
    present = [
        place for place, client_id in enumerate(state.client_ids) if method.plan.takes_part(client_id, round_number)
    ]
    if not present:
        return dataclasses.replace(state, round_number=round_number)
    own_states: Any = state.client_states
    if len(present) < len(state.client_ids):
        own_states, data, params = _select(own_states, present), data.select(present), params.select(present)
    server_state, new_states, _ = method.process.next(state.server_state, own_states, data, params)
    if len(present) < len(state.client_ids):
        new_states = _replace(state.client_states, present, new_states)
    after = dataclasses.replace(state, round_number=round_number, server_state=server_state, client_states=new_states)
    return _with_new_prox_weights(method.auto_prox, state, after) if method.auto_prox else after


def evaluate_clients(method: Method, state: Checkpoint, data: ClientValues) -> dict[str, Mapping[str, Any]]:
    """Returns each client's `personal` and `global` metrics on `data`; exact, not private. Needs an engine."""
    metrics = method.process.evaluate(state.server_state, state.client_states, data)
    return dict(zip(state.client_ids, metrics, strict=True))


def _with_new_prox_weights(parameters: SiloParameters, before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """The state after a round of MR-MTL, with what it teaches about lambda."""
    mean = {name: np.asarray(value) for name, value in before.server_state["algorithm"]["mean"].items()}
    learned = auto_prox.observe(
        before.auto_prox, parameters, _weights(before.client_states), _weights(after.client_states), mean
    )
    if auto_prox.is_refresh_round(after.round_number, parameters.rounds):
        learned = auto_prox.refresh(learned, parameters, after.round_number)
    return dataclasses.replace(after, auto_prox=learned)


def _weights(client_states: Sequence[Any]) -> dict[str, np.ndarray]:
    """The weights that silos keep and, by DP-SGD, have released, with a first axis of silos."""
    if isinstance(client_states, ClientValues):
        return client_states.columns()["weights"]
    rows = [state["weights"] for state in client_states]
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _select(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    # Engines take and return lists, too.
    return values.select(places) if isinstance(values, ClientValues) else [values[place] for place in places]


def _replace(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> Sequence[Any]:
    if isinstance(values, ClientValues) and isinstance(new, ClientValues):
        return values.replace(places, new)
    replaced = dict(zip(places, new, strict=True))
    return [replaced.get(place, value) for place, value in enumerate(values)]
