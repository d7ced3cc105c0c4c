"""Private selection: which of several public models fits a client's data best, by the exponential mechanism."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.mechanisms.random_bits import draw_bits

# Far from the places of a round's batches and noise (`tff_pdp.privacy.mechanisms.dp_sgd`).
_PLACE = 2**22
# What `selected` is where nothing is selected.
NOTHING = -1

# (candidates, data stacked, epsilons [clients], seeds [clients, 2]) -> int32 [clients]
Selector = Callable[[Weights, Any, tf.Tensor, tf.Tensor], tf.Tensor]


def build_selector(model: Model, loss_bound: float) -> Selector:
    """Builds `(candidates, data, epsilons, seeds) -> number of the candidate selected by each client`.

    A candidate's score is the number of examples it gets wrong or, for a regression, the sum of their losses, each
    clipped to `[0, loss_bound]`. Gumbel noise of scale `sensitivity / epsilon` is subtracted from each score and the
    smallest is selected: the exponential mechanism, by report-noisy-min. An example more makes no score smaller, so
    half the noise of the general mechanism gives the same guarantee: a candidate's log odds against any other change by
    the difference of two changes in `[0, sensitivity]`.

    Guarantee: one selection is epsilon-DP for the addition or removal of one example, and within that the bounded-range
      mechanism that `accounting.events.ExponentialMechanismDpEvent` describes. A client with epsilon 0 gets `NOTHING`,
      and its data are not looked at.
    Assumes: the candidates are public, or private already; seeds are secret and new in each round.

    Source: McSherry and Talwar, FOCS 2007; Dong, Durfee and Rogers, "Optimal differential privacy composition for
    exponential mechanisms", 2020, on the range of the losses and on monotonic scores; Liu et al., NeurIPS 2022,
    appendix B.3, with the number of errors for their rate, so that nothing is divided by a private count.

    Args:
      model: measures the examples.
      loss_bound: for a regression.
    """
    # As a float32, which losses are compared with.
    sensitivity = 1.0 if model.num_classes else float(np.float32(loss_bound))

    def misfit(weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        metrics = model.example_metrics(weights, x, y)
        # A loss that is not finite counts as the largest.
        loss = 1.0 - metrics["accuracy"] if model.num_classes else metrics["loss"]
        return tf.where(loss < sensitivity, tf.maximum(loss, 0.0), sensitivity)

    def select_one(candidates: Weights, x: Any, y: Any, size: Any, epsilon: Any, seed: Any) -> tf.Tensor:
        number = next(iter(candidates.values())).shape[0]
        own = tf.range(tf.shape(y)[0]) < size
        # Padding need not hold a label.
        labels = tf.where(own, y, tf.zeros([], y.dtype))
        misfits = [
            misfit({name: stacked[index] for name, stacked in candidates.items()}, x, labels) for index in range(number)
        ]
        # In float64, where the sums are exact enough for a sensitivity far below float32's last bit of a large one.
        scores = tf.stack([tf.reduce_sum(tf.cast(tf.where(own, one, 0.0), tf.float64)) for one in misfits])
        scale = sensitivity / tf.cast(epsilon, tf.float64)
        return tf.argmin(scores - scale * _gumbel(seed, number), output_type=tf.int32)

    def select(candidates: Weights, data: Any, epsilons: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        # One client after the other: all examples of all clients at once may not fit into memory.
        def of_client(values: Any) -> tf.Tensor:
            x, y, size, epsilon, seed = values
            return tf.cond(
                epsilon > 0,
                lambda: select_one(candidates, x, y, size, epsilon, seed),
                lambda: tf.constant(NOTHING),
            )

        return tf.map_fn(
            of_client,
            (data["x"], data["y"], data["num_examples"], epsilons, seeds),
            fn_output_signature=tf.TensorSpec([], tf.int32),
            parallel_iterations=1,
        )

    return select


def _gumbel(seed: tf.Tensor, size: int) -> tf.Tensor:
    """Standard Gumbel draws, float64 `[size]`, from 53 bits each."""
    words = tf.cast(tf.reshape(draw_bits(seed, 2 * size, place=_PLACE), [2, size]), tf.float64)
    high, low = tf.unstack(words)
    uniform = (tf.floor(high / 2.0**6) * 2.0**27 + tf.floor(low / 2.0**5) + 0.5) * 2.0**-53
    return -tf.math.log(-tf.math.log(uniform))
