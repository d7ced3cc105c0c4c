"""The mean of the liberal silos' updates alone, the control of PFA: strict silos' updates have no effect.

Where PFA is not better than this method, the projection has only dropped the strict silos. The papers call liberal
silos public, although their records are protected as all others are.
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
    silos. Client state: nothing. Released: the update as a row; and the epsilon, or a bit, if silos are grouped by it.

    Strict silos are charged in every round, as in PFA, although a real strict silo would not have to upload after the
    groups are known.

    Args:
      num_clients: number M of silos, each with a `client_index` of its own.
      partition: `by_norm`: the first of the rounds is a warm start that groups silos by the norms of their updates.
        `known`: by epsilons that the server knows. `declared`: by a bit that each silo uploads.
      liberal_share: fraction of silos that is liberal, with the largest epsilons; for `known`.
      liberal_epsilon: least epsilon of a liberal silo; for `declared`, and for `known` in place of the share.
      paper_raw_norms: group by raw norms in two groups, as the paper describes; often wrong with three budgets.

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
