"""Makes synthetic examples by a generator network that is fitted to one noised mean embedding.

A record is mapped to a vector phi of norm at most 1: its class, and random Fourier features of its features, by class.
The Gaussian mechanism releases the sum of phi over all records, once. The mean of random Fourier features determines
what a Gaussian kernel can tell of a distribution, so a network whose examples have the noised means as theirs has
learned the distribution, up to noise. The number of released values does not depend on the number of features.

Source: Harder, Adamczewski and Park, "DP-MERF: Differentially Private Mean Embeddings with Random Features for
Practical Privacy-Preserving Data Generation", AISTATS 2021, arXiv:2002.11603.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated, NamedTuple

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws, add_noise
from tff_pdp.privacy.synthetic.base import SyntheticExamples, draw_labels, draw_normals
from tff_pdp.privacy.synthetic.records import MOST_VALUES, PooledGenerator, check_records
from tff_pdp.privacy.synthetic.sums import (
    FRACTION_BITS,
    ClassSums,
    classes_above_noise,
    in_parts,
    remaining_share,
    root,
    to_steps,
)
from tff_pdp.settings import Count, Positive, Share

# Frequencies are public, and the same for all silos.
_PUBLIC_KEY = b"tff_pdp dp_merf: frequencies, which are public"
# Sums of features times frequencies stay at or below 2**_SUM_BITS, where float64 does not round.
_SUM_BITS = 52
# A turn has this many angles, whose cosines and sines are looked up.
_ANGLE_BITS = 16
# A share by which cosines are shortened, above what float64 rounds in them.
_SHORTER = 2.0**-40
# Cosines of as many values at once take some 32 MB.
_VALUES_AT_ONCE = 2**22
# Examples that the network makes at once.
_EXAMPLES_AT_ONCE = 2**14


class DpMerf(PooledGenerator, tag="dp_merf"):
    """Fits a generator network to the noised means of random Fourier features of each class (DP-MERF).

    Attributes:
      num_features: F, number of random frequencies; each has a cosine and a sine. More frequencies tell more of a
        distribution, with noise as large on each.
      length_scale: l, standard deviation of the Gaussian kernel, in the unit of features (after pooling); usual
        distances between examples are best. Without a value, l is the root of the mean squared distance of two examples
        whose features are uniform between `low` and `high`: (high - low) sqrt(features / 6).
      count_share: a, share of the sensitivity that class counts have; Fourier features have sqrt(1 - a^2).
      steps: number of Adam's steps of the fit.
      batch_size: number of the network's examples in a step, divided evenly among classes; at least two of each class.
      learning_rate: Adam's learning rate in the first step; falls linearly to zero.
      hidden_units: number of units of each hidden layer of the network.
      code_size: number of the network's random inputs.
    """

    num_features: Annotated[int, Meta(ge=1, le=20_000)] = 1000
    length_scale: Annotated[float, Meta(ge=1e-30, le=1e30)] | None = None
    count_share: Share = 0.3
    steps: Count = 1000
    batch_size: Count = 500
    learning_rate: Positive = 0.01
    hidden_units: Annotated[Sequence[Count], Meta(min_length=1)] = (256,)
    code_size: Count = 10

    @property
    def embedding_share(self) -> float:
        """Share of the sensitivity that Fourier features have, b = sqrt(1 - a^2), rounded so that a^2 + b^2 <= 1."""
        return remaining_share(self.count_share)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one release: a Gaussian sum, whose noise is drawn exactly and costs nothing more."""
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks shapes, labels, the length scale, and the size of the release."""
        _check(x, y, self)

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        noise_multiplier: float,
        draws: ExactDraws,
        *,
        ids: Sequence[str] | None = None,
    ) -> SyntheticExamples:
        """Makes synthetic examples by `dp_merf`, whose sum treats all records alike, whatever their `ids`."""
        return dp_merf(x, y, self, noise_multiplier, draws)


class Frequencies(NamedTuple):
    """Random frequencies as whole numbers, so that sums of features times frequencies are exact.

    Features are first brought to [0, 1], and become whole multiples of 2**-20.

    Attributes:
      whole: whole numbers, float64 `[input features, F]`; times 2**-bits these are turns (2 pi) for each unit.
      bits: number of bits after the binary point.
    """

    whole: np.ndarray
    bits: int

    @property
    def turns(self) -> np.ndarray:
        """Turns for each unit of a feature between 0 and 1, float64 `[input features, F]`."""
        return self.whole * 2.0**-self.bits


def dp_merf(
    x: np.ndarray, y: np.ndarray, settings: DpMerf, noise_multiplier: float, draws: ExactDraws
) -> SyntheticExamples:
    """Releases counts and mean embeddings with noise, fits a network to them, and draws synthetic examples from it.

    Guarantee: under ADD_OR_REMOVE_ONE adjacency, `settings.event(noise_multiplier)` covers the result: a record moves
      the sum by at most 1 in L2 norm (`embedding_steps`), and the result is a function of the noised sum and of random
      bits. Under REPLACE_ONE adjacency a record moves the sum by at most 2. Equal draws give equal examples on a
      machine.
    Assumes: as in `Generator.fit`.

    Args, Raises: as in `Generator.fit`; DataError also if the fit diverges, which is a function of the release alone.
    """
    settings.check_noise(noise_multiplier)
    frequencies = _check(x, y, settings)
    noised = add_noise(embedding_steps(x, y, settings, frequencies, noise_multiplier), noise_multiplier, draws)
    # From here on, nothing depends on the records.
    counts, sums = noised[: settings.num_classes] / settings.count_share, noised[settings.num_classes :]
    kept = classes_above_noise(counts, noise_multiplier / settings.count_share)
    counts = counts[kept]
    sums = sums.reshape(settings.num_classes, 2 * settings.num_features)[kept] / settings.embedding_share
    generate = fit_network(sums / counts[:, None], counts / counts.sum(), frequencies, settings, draws)
    labels = draw_labels(counts, settings.examples, draws)
    made = generate(labels)
    if not np.isfinite(made).all():
        raise DataError(
            f"the network's fit diverges at learning_rate {settings.learning_rate:g}: choose a smaller one. The "
            "release has been made: its cost counts"
        )
    made = settings.low + (settings.high - settings.low) * made
    return SyntheticExamples(settings.examples_of(made, x.shape[1:]), kept[labels])


def embedding_steps(
    x: np.ndarray, y: np.ndarray, settings: DpMerf, frequencies: Frequencies, noise_multiplier: float
) -> np.ndarray:
    """Sums phi over records, in whole steps of `exact_draws`: Python's integers `[values]`.

    Let e_y be the one-hot vector of the class, W the frequencies, and x the features. Then phi = (a e_y, b e_y (x)
    [cos Wx, sin Wx] / sqrt(F)), where (x) is the Kronecker product and b = sqrt(1 - a^2).

    Guarantee: adding or removing one record changes the sum by at most 1 in L2 norm. The squares of a rounded cosine
      and a rounded sine sum to at most 1 (`whole_waves`), so the squared norm of phi is at most a^2 + b^2 = 1. Sums are
      exact, and `to_steps` keeps the bound. Values that are out of range or missing do not change this bound.
    Assumes: labels are in range.

    Args:
      x: `[n, *input_shape]`.
      y: `[n]`, classes.
      settings: public settings.
      frequencies: W, from `draw_frequencies`.
      noise_multiplier: standard deviation of the noise that will be added.
    """
    by_class = ClassSums(settings.num_classes, 2 * settings.num_features)
    rows = max(1, _VALUES_AT_ONCE // (2 * settings.num_features))
    for whole, labels in in_parts(x, y, rows, lambda some: whole_waves(some, settings, frequencies)):
        by_class.add(whole, labels)
    scale = Fraction(settings.embedding_share) * root(Fraction(1, settings.num_features)) / 2**FRACTION_BITS
    blocks = [(by_class.counts, Fraction(settings.count_share)), (by_class.sums.ravel(), scale)]
    return to_steps(blocks, noise_multiplier)


def draw_frequencies(settings: DpMerf, input_features: int) -> Frequencies:
    """Draws frequencies W with standard deviation 1 / l from a public key: equal settings give equal frequencies.

    Args:
      settings: public settings.
      input_features: number of features after pooling.

    Raises:
      ConfigError: the length scale is so short for the range that angles have no precision.
    """
    shape, width = (input_features, settings.num_features), settings.high - settings.low
    length = settings.length_scale or width * math.sqrt(input_features / 6)
    turns = draw_normals(shape, ExactDraws(_PUBLIC_KEY)) * (width / length / (2 * math.pi))
    # Most turns that features between 0 and 1 can make.
    largest = np.abs(turns).sum(axis=0).max()
    bits = _SUM_BITS - FRACTION_BITS - math.ceil(math.log2(max(largest, 1)))
    if bits < _ANGLE_BITS:
        raise ConfigError(f"length_scale is {length:g}, which is too short for features {width:g} apart")
    return Frequencies(np.trunc(turns * 2.0**bits), bits)


def whole_waves(x: np.ndarray, settings: DpMerf, frequencies: Frequencies) -> np.ndarray:
    """Computes cosines and sines of examples, in multiples of 2**-20: int32 `[n, 2 F]`, all cosines first.

    Guarantee: each row is a function of its own example alone, to the last bit: products with frequencies are whole
      numbers that float64 adds up without rounding, and cosines are looked up in a table of 2**16 angles. The squares
      of a cosine and a sine sum to at most 2**40.
    """
    units = (settings.rows(x) - settings.low) / (settings.high - settings.low)
    whole = np.trunc(np.clip(units, 0, 1) * 2.0**FRACTION_BITS)
    turns = (whole @ frequencies.whole).astype(np.int64)
    angles = (turns >> (FRACTION_BITS + frequencies.bits - _ANGLE_BITS)) & (2**_ANGLE_BITS - 1)
    # The middle of the angles that have the same place in the table.
    table = (np.arange(2**_ANGLE_BITS) + 0.5) * (2 * math.pi / 2**_ANGLE_BITS)
    scale = (1 - _SHORTER) * 2.0**FRACTION_BITS
    waves = [np.trunc(wave(table) * scale).astype(np.int32)[angles] for wave in (np.cos, np.sin)]
    return np.concatenate(waves, axis=1)


def fit_network(
    means: np.ndarray, shares: np.ndarray, frequencies: Frequencies, settings: DpMerf, draws: ExactDraws
) -> Callable[[np.ndarray], np.ndarray]:
    """Fits a generator network G(code, class) to mean embeddings by Adam; nothing here depends on records.

    The loss is the unbiased estimate of the squared distance of mean embeddings, weighted by classes' shares: the
    squared norm of a batch's mean, without the products of an example with itself, which would favour examples that are
    all alike.

    Args:
      means: noised mean of [cos Wx, sin Wx] / sqrt(F) of each class, `[classes, 2 F]`.
      shares: share of each class, `[classes]`.
      frequencies: W.
      settings: public settings.
      draws: random draws, which need not be secret.

    Returns:
      Function from places of classes in `means`, `[n]`, to features between 0 and 1, float64 `[n, input features]`.
    """
    # TensorFlow takes seconds to import.
    import tensorflow as tf

    from tff_pdp.models.dense import build_mlp

    num_classes, num_inputs = len(means), len(frequencies.whole)
    each = max(2, settings.batch_size // num_classes)
    network = build_mlp((settings.code_size + num_classes,), num_inputs, settings.hidden_units)
    with tf.device("/CPU:0"):
        weights = {name: tf.Variable(tf.constant(value)) for name, value in network.init(draws.below(2**31)).items()}
        # Units of features to angles.
        to_angles = tf.constant(frequencies.turns * (2 * math.pi), tf.float32)
        targets, class_shares = tf.constant(means, tf.float32), tf.constant(shares, tf.float32)
        classes = tf.repeat(tf.eye(num_classes), each, axis=0)
        optimizer = tf.keras.optimizers.Adam(
            tf.keras.optimizers.schedules.PolynomialDecay(settings.learning_rate, settings.steps, 0.0)
        )
        optimizer.build(list(weights.values()))

        def examples(codes: tf.Tensor, one_hot: tf.Tensor) -> tf.Tensor:
            return tf.sigmoid(network.predict(weights, tf.concat([codes, one_hot], axis=1)))

        @tf.function
        def step(codes: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                angles = examples(codes, classes) @ to_angles
                waves = tf.concat([tf.cos(angles), tf.sin(angles)], axis=1) / math.sqrt(settings.num_features)
                made = tf.reduce_mean(tf.reshape(waves, [num_classes, each, 2 * settings.num_features]), axis=1)
                squares = (each * tf.reduce_sum(made * made, axis=1) - 1) / (each - 1)
                loss = tf.reduce_sum(class_shares * (squares - 2 * tf.reduce_sum(made * targets, axis=1)))
            variables = list(weights.values())
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for _ in range(settings.steps):
            step(tf.constant(draw_normals((num_classes * each, settings.code_size), draws), tf.float32))

    def generate(labels: np.ndarray) -> np.ndarray:
        codes, one_hot = draw_normals((len(labels), settings.code_size), draws), np.eye(num_classes)[labels]
        parts = []
        for first in range(0, len(labels), _EXAMPLES_AT_ONCE):
            part = slice(first, first + _EXAMPLES_AT_ONCE)
            with tf.device("/CPU:0"):
                made = examples(tf.constant(codes[part], tf.float32), tf.constant(one_hot[part], tf.float32))
            parts.append(np.asarray(made, np.float64))
        return np.concatenate(parts)

    return generate


def _check(x: np.ndarray, y: np.ndarray, settings: DpMerf) -> Frequencies:
    input_features = check_records(x, y, settings)
    num_values = settings.num_classes * (1 + 2 * settings.num_features)
    if num_values > MOST_VALUES:
        raise ConfigError(
            f"num_features {settings.num_features} and {settings.num_classes} classes make a release of "
            f"{num_values:,} values; at most {MOST_VALUES:,} are possible"
        )
    return draw_frequencies(settings, input_features)
