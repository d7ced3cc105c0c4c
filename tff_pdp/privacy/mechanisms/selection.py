"""Selects privately which of several public models fits a client's data best, by the exponential mechanism."""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.random_bits import draw_bits

# Far from the places of a round's batches and noise (`tff_pdp.privacy.mechanisms.dp_sgd`).
_PLACE = 2**22
# The number that is returned where no candidate is selected.
NOTHING = -1
# Number of whole steps in the loss bound of a regression's example.
LOSS_STEPS = 2**20
# 32-bit words of a candidate's draw: five for a uniform number, and one for the half of (0, 1) that it lies in.
_WORDS = 6

# (candidates, data stacked, epsilons [clients], seeds [clients, 2]) -> int32 [clients]
Selector = Callable[[Weights, Any, tf.Tensor, tf.Tensor], tf.Tensor]


def build_selector(model: Model, loss_bound: float, generator: Generator = "philox") -> Selector:
    """Builds a function `(candidates, data, epsilons, seeds) -> index of the candidate that each client selects`.

    A candidate's score is the number of examples that the candidate gets wrong. For a regression, the score is the sum
    of all examples' losses, each clipped to `[0, loss_bound]` and rounded down to whole steps of
    `loss_bound / LOSS_STEPS`. Scores are whole numbers and are added up exactly. So one example changes a score by at
    most the sensitivity (1, or LOSS_STEPS for a regression), whatever the order and size of other losses.

    For each candidate an exponential variable is drawn and multiplied by `exp(epsilon * score / sensitivity)`. The
    candidate with the smallest product is selected; this is the exponential mechanism. An added example makes no score
    smaller, so the difference of two scores changes by the difference of two numbers in `[0, sensitivity]`. Therefore
    half the noise of the general mechanism gives the same guarantee.

    Guarantee: one selection is epsilon-DP for the addition or removal of one example, and more precisely the
      bounded-range mechanism that `accounting.events.ExponentialMechanismDpEvent` describes, up to the rounding errors
      that `first_of` bounds. A client with epsilon 0 gets `NOTHING` (-1), and its data are not used.
    Assumes: the candidates are public, or released privately; seeds are secret and new in each round; the generator's
      bits are indistinguishable from random bits. No bit of a model's metrics for an example depends on other rows or
      their number.

    Source: McSherry and Talwar, FOCS 2007; Dong, Durfee and Rogers, "Optimal differential privacy composition for
    exponential mechanisms", 2020, on the range of the losses and on monotonic scores; Liu et al., NeurIPS 2022,
    appendix B.3, but with the number of errors in place of their rate, so that nothing is divided by a private count.
    """
    sensitivity = 1 if model.num_classes else LOSS_STEPS

    def misfit(weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        metrics = model.example_metrics(weights, x, y)
        # NaN counts as the largest.
        if model.num_classes:
            return tf.where(metrics["accuracy"] >= 0.5, tf.zeros([], tf.int64), 1)
        loss = tf.cast(metrics["loss"], tf.float64)
        clipped = tf.where(loss < loss_bound, tf.maximum(loss, 0.0), loss_bound)
        return tf.cast(clipped / loss_bound * LOSS_STEPS, tf.int64)

    def select_one(candidates: Weights, x: Any, y: Any, size: Any, epsilon: Any, seed: Any) -> tf.Tensor:
        number = next(iter(candidates.values())).shape[0]
        own = tf.range(tf.shape(y)[0]) < size
        # Padding need not hold a label.
        labels = tf.where(own, y, tf.zeros([], y.dtype))
        misfits = [
            misfit({name: stacked[index] for name, stacked in candidates.items()}, x, labels) for index in range(number)
        ]
        exact = [tf.reduce_sum(tf.where(own, one, tf.zeros([], tf.int64))) for one in misfits]
        # Whole numbers below 2**53 stay what they are.
        scores = tf.stack([tf.cast(one, tf.float64) for one in exact])
        words = tf.reshape(draw_bits(seed, _WORDS * number, _PLACE, generator), [_WORDS, number])
        return first_of(scores, sensitivity, tf.cast(epsilon, tf.float64), words)

    def select(candidates: Weights, data: Any, epsilons: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        # One client after the other: all examples of all clients at once may not fit into memory.
        def of_client(values: Any) -> tf.Tensor:
            x, y, size, epsilon, seed = values
            return tf.cond(
                epsilon > 0, lambda: select_one(candidates, x, y, size, epsilon, seed), lambda: tf.constant(NOTHING)
            )

        return tf.map_fn(
            of_client,
            (data["x"], data["y"], data["num_examples"], epsilons, seeds),
            fn_output_signature=tf.TensorSpec([], tf.int32),
            parallel_iterations=1,
        )

    return select


def first_of(scores: tf.Tensor, sensitivity: int, epsilon: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Selects a candidate, int32 scalar, with a probability proportional to exp(-epsilon * score / sensitivity).

    Guarantee: for up to 4,000 candidates, the log-ratio of each candidate's probability to the ideal probability is at
      most 2**-44 in magnitude, except for draws of probability at most 2**-100.

      Let exponential variables of rate 1 be multiplied by one factor each. Each product then is the smallest with a
      probability proportional to the inverse of its factor. Let computed products have relative errors of at most h.
      Then candidate i is selected whenever i's exact product, times (1 + h) / (1 - h), is the smallest, and only if i's
      exact product, divided by this ratio, is the smallest. So i's probability is within this ratio of the ideal
      probability, and the log-ratio is at most little more than 2 h.

      Here h is below 2**-45.2. Let u = 2**-53, and let TensorFlow's exp, log and log1p err by at most 8 u. The exponent
      x is one product of exact numbers, so that exp(x) errs by 109 u if x is at most 100. A candidate with a larger x
      is selected with a probability of at most exp(-99), both here and ideally. A uniform number of 160 drawn bits has
      an error of 21 u if the number is at least 2**-112; the exponential variable made from this number has an error of
      51 u.
    Assumes: the words are secret and used for nothing else.

    Args:
      scores: float64 `[candidates]`, whole numbers, at least 0 and below 2**53.
      sensitivity: largest change of a score by one example, a power of two.
      epsilon: float64 scalar, positive; if infinite, the first candidate with the smallest score is selected.
      words: uint32 `[6, candidates]`, uniform.
    """
    beyond_best = scores - tf.reduce_min(scores)
    # Infinity times zero is no number.
    stretch = tf.exp(tf.where(beyond_best > 0, epsilon / sensitivity * beyond_best, 0.0))
    times = tf.where(tf.math.is_inf(epsilon), tf.ones_like(stretch), exponential_times(words))
    return tf.argmin(times * stretch, output_type=tf.int32)


def exponential_times(words: tf.Tensor) -> tf.Tensor:
    """Makes exponential variables of mean 1, float64 `[candidates]`, from uint32 `[6, candidates]`.

    Each variable is minus the logarithm of a uniform number. A random bit decides if this number is below or above one
    half, and another uniform number sets the distance from zero or from one. So no digits are lost near either end.
    """
    # As float64: lists of whole numbers have no kernel on GPUs.
    coin, *digits = tf.unstack(tf.cast(words, tf.float64))
    # The middle of the interval that the drawn digits leave open.
    uniform = tf.fill(tf.shape(coin), tf.constant(0.5, tf.float64))
    for digit in reversed(digits):
        uniform = (digit + uniform) * 2.0**-32
    return tf.where(coin < 2.0**31, math.log(2.0) - tf.math.log(uniform), -tf.math.log1p(-uniform / 2.0))
