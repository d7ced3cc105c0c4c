"""Trains by the mean of the liberal silos' updates alone: the control to compare PFA with.

Liberal silos have large budgets, hence little noise. The updates of all other silos, the strict ones, have no effect,
unless no liberal silo takes part. Where PFA is not better than this method, PFA's projection has only dropped the
strict silos. The papers call liberal silos public, although the records of liberal silos are protected like all others.
"""

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, Traffic, choose, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.algorithms.projection.groups import Groups, Partition
from tff_pdp.algorithms.projection.subspaces import mean_of_rows
from tff_pdp.settings import Positive, Share


def build_public_only(
    *,
    num_clients: int,
    partition: Partition = "by_norm",
    liberal_share: Share = 0.1,
    liberal_epsilon: Positive | None = None,
    paper_raw_norms: bool = False,
) -> Algorithm:
    """Builds the mean of liberal updates. Server state: the shared weights, the number of rounds, and the liberal
    silos. Client state: nothing. Released, as rows: the update; for `known` also the epsilon, for `declared` a bit.

    Strict silos are charged in every round, as in PFA, although a real strict silo would not have to upload after the
    groups are known.

    Args:
      num_clients: number M of silos, each with a `client_index` of its own.
      partition: rule that says which silos are liberal. `by_norm` looks at the norms of the updates in the first round,
        a warm start; `known` at epsilons that the server knows; `declared` at a bit that each silo uploads.
      liberal_share: fraction of the silos that is liberal (the silos with the largest epsilons); only for `known`.
      liberal_epsilon: least epsilon of a liberal silo; for `declared`, and for `known` in place of `liberal_share`.
      paper_raw_norms: make two groups by raw norms, as the paper describes; with three different budgets these groups
        are often wrong.

    Raises:
      ConfigError: two settings do not suit each other.
    """
    groups = Groups(num_clients, partition, liberal_share, liberal_epsilon, paper_raw_norms)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        weights = local_sgd(broadcast["weights"], data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(lambda new, old: new - old, weights, broadcast["weights"])
        return ClientResult(state=client_state, released={"update": update, **groups.release(hparams)})

    def server_update(state, aggregates):
        rows, present = aggregates["update"]["rows"], aggregates["update"]["present"]
        is_first = tf.equal(state["round"], 0)
        is_liberal = tf.where(is_first, groups.decide(aggregates), state["is_liberal"])
        liberal = present * is_liberal
        movement = choose(tf.reduce_sum(liberal) > 0, mean_of_rows(rows, liberal), mean_of_rows(rows, present))
        moves = state["round"] + 1 >= groups.first_moving_round
        weights = map_weights(lambda w, u: tf.where(moves, w + u, w), state["weights"], movement)
        return {"weights": weights, "round": state["round"] + 1, "is_liberal": is_liberal}

    def traffic(state, round_number):
        everything = float(sum(np.size(value) for value in state["weights"].values()))
        liberal = np.asarray(state["is_liberal"]) > 0.5
        is_needed = liberal | (round_number < groups.first_moving_round or not liberal.any())
        return Traffic(np.where(is_needed, everything, 0.0), np.full(num_clients, everything))

    return Algorithm(
        name="public_only",
        title="Liberal silos only",
        hparams={**LOCAL_TRAINING, **groups.hparams},
        released={"update": "rows", **groups.released},
        num_clients=num_clients,
        data_passes=1,
        init_server=lambda weights: {
            "weights": weights,
            "round": tf.constant(0),
            "is_liberal": tf.zeros([num_clients]),
        },
        init_client=lambda broadcast: {},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: broadcast["weights"],
        needs_everyone=True,
        traffic=traffic,
        warning=groups.warning,
    )
