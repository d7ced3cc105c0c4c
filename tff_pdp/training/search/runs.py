"""Runs a search for hyper-parameters: the pivot run of all silos together, and each silo's own repetitions.

In a deployment, each silo runs its repetitions locally. The simulation computes the repetitions of all silos together,
but every silo draws a separate number of repetitions and separate candidates. Messages from a repetition to the server
are discarded.

`SearchState` is the progress of a search, saved like a checkpoint. Some of its values would never leave a silo in a
deployment.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.plans.search import Search
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record.releases import surroundings_of
from tff_pdp.training.rounds import run_round
from tff_pdp.training.run_folder import FILES_BESIDE


class Pivot(NamedTuple):
    """The results of the pivot run; in a deployment, a silo knows its client state and the server's messages.

    Attributes:
      server_states: server states before the first round and after each round; the server's messages follow from them.
      client_states: state of every silo, in the order of the client dataset.
    """

    server_states: Sequence[Any]
    client_states: Sequence[Any]


def numbers_of_runs(method: Method, search: Search, run_key: RunKey) -> list[int]:
    """Draws each silo's number of runs, which is secret and depends only on the run key, not on data."""
    return [
        search.draw_number_of_runs(run_key.generator("number of runs", client_id))
        for client_id in method.clients.client_ids
    ]


def candidate_of(search: Search, run_key: RunKey, client_id: str, run: int) -> Mapping[str, float]:
    """Draws the candidate of one silo in one run: values of hyper-parameters, by name."""
    return search.draw_candidate(run, run_key.generator("hyperparameters", client_id, run))


def run_pivot(method: Method, search: Search, first: Checkpoint, data: ClientValues, rounds: Iterable[int]) -> Pivot:
    """Trains with the method's configured hyper-parameters, unless the method releases nothing. Needs an engine.

    A resumed search repeats the pivot run, which releases nothing new, because the key is the same. `first` is the
    state before the first round; its ledger is charged already. `rounds` are the round numbers, ascending from 1. The
    other arguments are as in `repeat`.
    """
    if not search.has_pivot:
        return Pivot([first.server_state] * (method.plan.rounds + 1), first.client_states)
    state = dataclasses.replace(first, ledger=None)
    # As arrays: a state for each round would fill an accelerator's memory.
    server_states = [tf.nest.map_structure(np.asarray, state.server_state)]
    for round_number in rounds:
        state = run_round(method, state, round_number, data)
        server_states.append(tf.nest.map_structure(np.asarray, state.server_state))
    return Pivot(server_states, state.client_states)


def repeat(
    method: Method,
    search: Search,
    pivot: Pivot,
    first_client_state: Any,
    run_key: RunKey,
    run: int,
    places: Sequence[int],
    data: ClientValues,
) -> Sequence[Any]:
    """Trains some silos once more, each with the silo's candidate for repetition `run`. Needs an engine.

    Silos start in `first_client_state` and receive the messages that the server sent in the pivot run.

    Args:
      method: the method that trains.
      search: the method's search.
      pivot: the pivot run.
      first_client_state: state of any silo before its first round.
      run_key: the run's secret.
      run: number of the repetition, from 1.
      places: positions, among all silos, of the silos to train.
      data: every client's training examples.

    Returns:
      The states of the trained silos after the last round, in the order of `places`.
    """
    candidates = [candidate_of(search, run_key, client_id, run) for client_id in method.clients.client_ids]
    searched = {
        name: np.array([candidate[name] for candidate in candidates], method.hparams[name].dtype)
        for name in search.candidates[0]
    }
    own_data = data.select(places)
    states: Any = [first_client_state] * len(places)
    for round_number, server_state in enumerate(pivot.server_states[:-1], 1):
        params = method.client_params(run_key, round_number, changed=searched, run=run)
        # The server's new state stays here, unread: nothing of a repetition is released.
        _, states, _ = method.process.next(server_state, states, own_data, params.select(places))
    return states


def noisy_scores(
    method: Method,
    search: Search,
    pivot: Pivot,
    run_key: RunKey,
    run: int,
    places: Sequence[int],
    states: Sequence[Any],
    validation: ClientValues,
) -> list[float]:
    """Scores some silos' models on their own validation examples, with noise. Needs an engine.

    Arguments are as in `repeat`; `states` is the result of `repeat`; `validation` has all clients' validation examples.
    """
    personal = method.process.personalise(pivot.server_states[-1], states)
    scores = []
    for place, weights in zip(places, personal, strict=True):
        examples = validation[place]
        size = int(examples["num_examples"])
        own = example_scores(method.model, weights, examples["x"][:size], examples["y"][:size], search.sensitivity)
        scores.append(search.noised(own, run_key.generator("score", method.clients.client_ids[place], run)))
    return scores


def example_scores(model: Model, weights: Weights, x: np.ndarray, y: np.ndarray, bound: float) -> np.ndarray:
    """Returns a model's exact score for each example, float64 `[n]`; higher is better. Scores are not private.

    Guarantee: the absolute value of each score is at most `bound`, for any example and any weights.
    Assumes: the model's output for an example does not depend on other examples.

    Args:
      model: the model.
      weights: weights of the model.
      x: float32 `[n, *input_shape]`; n may be 0.
      y: labels, `[n]`.
      bound: bound on scores, 1 for a classifier. A classifier's score is 1 for a correct answer, else 0. The score of a
        regression is minus the squared error, which is clipped to the bound.
    """
    if not len(y):
        return np.zeros(0)
    # One example changes these by little, also where models are judged by a ranking.
    name = "accuracy" if model.num_classes else "squared_error"
    # In float64, like the bound: a float32 may be larger than the bound that is accounted for.
    measured = np.asarray(model.example_metrics(weights, tf.constant(x), tf.constant(y))[name], np.float64)
    # An error that is not a number counts as the largest.
    return measured if model.num_classes else -np.where(measured < bound, measured, bound)


@dataclasses.dataclass(frozen=True)
class Best:
    """A silo's best run so far; results of its other runs are discarded.

    Attributes:
      client_state: the silo's state after its best run; None before the first run.
      score: noisy score of the best run; minus infinity before the first run.
      run: number of the best run, from 1; 0 before the first run.
    """

    client_state: Any = None
    score: float = -math.inf
    run: int = 0


@dataclasses.dataclass(frozen=True)
class SearchState:
    """The progress of a search after some of its runs.

    Attributes:
      first: the state before the first round, with the run key and a ledger that is charged for the whole search.
      best: best run of each silo, in the order of `first.client_ids`.
      runs_done: number of finished runs of each silo; a silo that drew a smaller number of runs has finished its runs.
    """

    first: Checkpoint
    best: Sequence[Best]
    runs_done: int = 0


def save(folder: Path, state: SearchState) -> None:
    """Writes a search's state to a folder that only the owner can list, because the number of runs is secret."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = dataclasses.replace(
        state.first,
        # Counted from 1: even before its first run a search has been charged for.
        round_number=1 + state.runs_done,
        server_state=collections.OrderedDict(),
        client_states=[
            collections.OrderedDict(
                client_state=collections.OrderedDict() if one.client_state is None else one.client_state,
                score=np.float64(one.score),
                run=np.int64(one.run),
            )
            for one in state.best
        ],
        surroundings=surroundings_of(folder.parent, FILES_BESIDE),
    )
    checkpoints.save(folder, content)


def load(folder: Path, first: Checkpoint) -> SearchState | None:
    """Reads the newest state of a search from a folder of checkpoints; None without a checkpoint.

    `first` is a state before the first round; the result has the stored key and ledger in place of those in `first`.

    Raises:
      DataError: the state cannot be read.
    """
    saved = checkpoints.load_latest(folder)
    if saved is None:
        return None
    kept = [(one["client_state"], float(one["score"]), int(one["run"])) for one in saved.client_states]
    return SearchState(
        first=dataclasses.replace(
            first,
            ledger=saved.ledger,
            run_key=saved.run_key,
            config_hash=saved.config_hash,
            surroundings=saved.surroundings,
        ),
        best=[Best(client_state, score, run) if run else Best() for client_state, score, run in kept],
        runs_done=saved.round_number - 1,
    )
