"""A ranking's figure over the test examples of all clients together, each scored by its own client's personal model."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.experiment.examples import Examples
from tff_pdp.experiment.method import Method
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.rounds import ready_states


def pooled_figures(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> dict[str, float]:
    """Returns the figure of the model's ranking by its name, such as `pooled_average_precision`. Needs an engine.

    Exact, not private. Unlike a mean of clients' own figures, it also counts how the scores of one client's model
    compare with those of another's. NaN where no client has a positive example. Empty where the model is judged by a
    mean over examples, which is the same over clients as over their examples.

    Args:
      method: what was trained.
      state: after some rounds.
      data: held-out examples.
      train_data: training examples of users that adapt to them first.
    """
    ranking = method.model.ranking
    if ranking is None:
        return {}
    parts = list(client_scores(method, state, data, train_data))
    scores, labels = (np.concatenate([part[index] for part in parts] or [np.empty(0)]) for index in (0, 1))
    return {f"pooled_{ranking.metric.name}": ranking.pooled(scores, labels)}


def client_scores(
    method: Method, state: Checkpoint, data: Examples | ClientValues, train_data: Examples | ClientValues | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores float32 `[n]` and labels int64 `[n]` of each client that has examples, in the order of the client dataset.

    Needs an engine. Arguments are as of `pooled_figures`.
    """
    for places, states in ready_states(method, state, train_data):
        own_data = data if isinstance(data, ClientValues) else data.select(places)
        for weights, examples in zip(method.process.personalise(state.server_state, states), own_data, strict=True):
            size = int(examples["num_examples"])
            # Some operations give an empty batch a wrong shape.
            if size:
                outputs = method.model.predict(weights, tf.constant(examples["x"][:size]))
                yield np.asarray(method.model.scores(outputs)), examples["y"][:size]
