"""Mocha in its primal form (Smith et al., "Federated Multi-Task Learning", NeurIPS 2017).

Clients' weights are the rows of a matrix W, pulled to each other by `lambda / 2 * tr(W^T Omega W)`. Omega is learned
beside them: it is the inverse of `Sigma = (W W^T)^(1/2)`, scaled to a mean eigenvalue of one so that lambda means
about as much as in MR-MTL. The server knows every row, all of them private when they arrive, so what it learns about
relations costs nothing.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, SET_BY_RUNTIME, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.models.base import Weights
from tff_pdp.settings import Fraction


def build_mocha(*, num_clients: int, smallest_share: Fraction = 0.1, paper_covariance: bool = False) -> Algorithm:
    """Builds Mocha. Server state: W, and the relations `[num_clients, num_clients]`. Client state: its row.

    Released: the client's row.

    Args:
      num_clients: number of clients, all with a `client_index` of their own.
      smallest_share: lower bound of Sigma's eigenvalues, relative to their mean, before it is inverted.
      paper_covariance: put Sigma itself, scaled to trace one, in Omega's place, as the released code of the MR-MTL
        paper does: similar clients are then pushed apart instead of pulled together.
    """

    def pull_of_others(broadcast, index):
        """The weights the others pull to, and how strongly: the term's gradient is `strength * (w - anchor)`."""
        strengths = tf.gather(broadcast["relations"], index)
        own = tf.gather(strengths, index)
        others = strengths * (1.0 - tf.one_hot(index, num_clients))
        # The diagonal of a positive definite matrix is positive.
        anchor = map_weights(lambda rows: -tf.tensordot(others, rows, 1) / own, broadcast["rows"])
        return anchor, own

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        index = hparams["client_index"]
        anchor, strength = pull_of_others(broadcast, index)
        own = Trajectory(client_state["weights"], anchor=anchor, prox_weight=hparams["prox_weight"] * strength)
        weights = local_sgd(own, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        return ClientResult(state={"weights": weights}, released={"row": weights})

    def server_update(state, aggregates):
        present = aggregates["row"]["present"] > 0

        def replace(old, new):
            # A client that has left keeps its last row.
            return tf.where(tf.reshape(present, [-1] + [1] * (old.shape.rank - 1)), new, old)

        rows = map_weights(replace, state["rows"], aggregates["row"]["rows"])
        return {"rows": rows, "relations": relations_between(rows, smallest_share, paper_covariance)}

    def init_server(weights):
        return {
            "rows": map_weights(lambda value: tf.stack([tf.convert_to_tensor(value)] * num_clients), weights),
            "relations": tf.eye(num_clients) * (1.0 / num_clients if paper_covariance else 1.0),
        }

    return Algorithm(
        name="mocha",
        title="Mocha",
        hparams={
            **LOCAL_TRAINING,
            "prox_weight": prox_weight(0.01, "related clients' weights"),
            "client_index": SET_BY_RUNTIME,
        },
        released={"row": "rows"},
        num_clients=num_clients,
        data_passes=1,
        init_server=init_server,
        broadcast=lambda state: {"rows": state["rows"], "relations": state["relations"]},
        init_client=lambda broadcast: {"weights": map_weights(lambda rows: rows[0], broadcast["rows"])},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=None,
    )


def relations_between(rows: Weights, smallest_share: float, paper_covariance: bool) -> tf.Tensor:
    """The regulariser's matrix, from weights with a leading axis of clients: float32 `[clients, clients]`."""
    matrix = tf.concat([tf.reshape(value, [value.shape[0], -1]) for value in rows.values()], axis=1)
    eigenvalues, eigenvectors = tf.linalg.eigh(tf.matmul(matrix, matrix, transpose_b=True))
    # Rounding makes zeros slightly negative; all are zero where every weight is.
    roots = tf.sqrt(tf.maximum(eigenvalues, 0.0)) + 1e-12
    floored = tf.maximum(roots, smallest_share * tf.reduce_mean(roots))
    if paper_covariance:
        scaled = floored / tf.reduce_sum(floored)
    else:
        scaled = 1.0 / floored
        scaled /= tf.reduce_mean(scaled)
    return tf.matmul(eigenvectors * scaled, eigenvectors, transpose_b=True)
