"""Runs a search for hyper-parameters: the pivot run of all silos together, and what each repeats by itself.

In a deployment the repetitions run inside each silo. The simulation computes those of all silos together, but every
silo draws for itself how often it repeats and what it tries, and what a repetition would release goes nowhere.

`SearchState` is how far a search has come. It holds what a silo would keep for itself, and is saved as a checkpoint is.
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
    """The results of the pivot run, known to each silo as far as they concern the silo.

    Attributes:
      server_states: before the first round, and after each; the server's messages follow from them.
      client_states: every silo's, in the order of the client dataset.
    """

    server_states: Sequence[Any]
    client_states: Sequence[Any]


def numbers_of_runs(method: Method, search: Search, run_key: RunKey) -> list[int]:
    """Draws how many runs each silo makes: a secret that does not depend on any data, and the same for the same key."""
    return [
        search.draw_number_of_runs(run_key.generator("number of runs", client_id))
        for client_id in method.clients.client_ids
    ]


def candidate_of(search: Search, run_key: RunKey, client_id: str, run: int) -> Mapping[str, float]:
    """Draws the candidate of one silo in one of its runs, by name of the hyper-parameter."""
    return search.draw_candidate(run, run_key.generator("hyperparameters", client_id, run))


def run_pivot(method: Method, search: Search, first: Checkpoint, data: ClientValues, rounds: Iterable[int]) -> Pivot:
    """Trains with the method's own hyper-parameters; a method that releases nothing needs no training. Needs an engine.

    Where the same run was made before, this makes it again: with the same key, it releases nothing new. Arguments are
    those of `repeat`; `first` is the state before the first round, whose ledger has been charged already, and `rounds`
    are numbers in order, from 1.
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
    """Trains some silos anew, each with its candidate of this run, against the server's messages of the pivot run.

    Needs an engine.

    Args:
      method: the method that trains.
      search: the method's.
      pivot: the pivot run.
      first_client_state: of any silo that has not taken part yet.
      run_key: the run's secret.
      run: number of the repetition, from 1.
      places: of the silos, among all.
      data: every client's training examples.

    Returns:
      The states of these silos after the last round.
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

    Args are as of `repeat`; `states` are its result, and `validation` has every client's validation examples.
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
    """Scores a model on each of some examples, the larger the better: float64 `[n]`; exact, not private.

    Guarantee: each is at most `bound` from zero, whatever the example and the weights.
    Assumes: the model's output of an example does not depend on the others.

    Args:
      model: the model.
      weights: the model's.
      x: float32 `[n, *input_shape]`; n may be 0.
      y: `[n]`.
      bound: 1 for a classifier, which gets 1 for a correct answer. A regression gets minus its squared error, which
        counts for at most this much.
    """
    if not len(y):
        return np.zeros(0)
    # One example changes these by little, also where models are judged by a ranking.
    name = "accuracy" if model.num_classes else "squared_error"
    # In float64, as the bound: as a float32 it may be larger than what is accounted for.
    measured = np.asarray(model.example_metrics(weights, tf.constant(x), tf.constant(y))[name], np.float64)
    # An error that is not a number counts as the largest.
    return measured if model.num_classes else -np.where(measured < bound, measured, bound)


@dataclasses.dataclass(frozen=True)
class Best:
    """A silo's best run so far. Nothing of its other runs is kept.

    Attributes:
      client_state: after the run; None where there was no run yet.
      score: with noise; minus infinity where there was no run yet.
      run: its number, from 1; 0 where there was no run yet.
    """

    client_state: Any = None
    score: float = -math.inf
    run: int = 0


@dataclasses.dataclass(frozen=True)
class SearchState:
    """A search between two of its runs.

    Attributes:
      first: the state before the first round, with the key, and with a ledger that has been charged for the search.
      best: by silo, in the order of `first.client_ids`.
      runs_done: how many runs every silo has made that makes so many.
    """

    first: Checkpoint
    best: Sequence[Best]
    runs_done: int = 0


def save(folder: Path, state: SearchState) -> None:
    """Writes the state where nobody but the owner can list it: how many runs were made is a secret."""
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
    """Reads the newest state in a folder of checkpoints, or returns None where there is none.

    `first` is a state before the first round, whose key and ledger are replaced by those of the search.

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
