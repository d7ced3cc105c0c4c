"""Parts that generators by conditional networks share: noised counts of classes, and the network that makes examples.

Networks see features in [0, 1], and a class as a one-hot vector beside them. The network that makes examples learns
from released values alone. It has no batch normalisation, whose running averages would be another release.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tff_pdp.privacy.accounting.events import require
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws, add_noise
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples, draw_labels, draw_uniform
from tff_pdp.privacy.synthetic.sums import classes_above_noise

# Examples that the network makes at once.
_ROWS = 2**12


def to_unit(x: np.ndarray, settings: Generator) -> np.ndarray:
    """Clips features to the public range, and maps the range to [0, 1]: float32 `[n, features]`.

    Each row is a function of its own example alone. Missing values become the middle of the range.
    """
    middle = settings.low + (settings.high - settings.low) / 2
    rows = np.nan_to_num(x.astype(np.float64), nan=middle, posinf=np.inf, neginf=-np.inf)
    rows = np.clip(rows.reshape(len(x), math.prod(x.shape[1:])), settings.low, settings.high)
    return ((rows - settings.low) / (settings.high - settings.low)).astype(np.float32)


def noised_sum(total: np.ndarray, squared_sensitivity: int, noise_multiplier: float, draws: ExactDraws) -> np.ndarray:
    """Releases a sum of whole numbers by the Gaussian mechanism: float64, shaped like `total`.

    Guarantee: if one record moves the sum by at most the root of `squared_sensitivity` in L2 norm, the result is that
      of a Gaussian mechanism with the given noise multiplier. One whole number makes as many steps of the noise's grid
      as fit into the standard deviation, rounded down, so that a record moves no more than it may.
    Assumes: as in `exact_draws.add_noise`.

    Args:
      total: whole numbers.
      squared_sensitivity: square of the largest change by one record.
      noise_multiplier: standard deviation of the noise divided by the sensitivity.
      draws: draws from a secret key.

    Raises:
      ConfigError: the noise's standard deviation is 2**26 whole numbers or more, or is not positive.
    """
    stddev = noise_multiplier * math.sqrt(squared_sensitivity)
    require(0 < stddev < 2.0**GRID_BITS, "the standard deviation of the noise", stddev, f"in (0, 2**{GRID_BITS})")
    steps = math.isqrt(math.floor(Fraction(4**GRID_BITS) / (Fraction(noise_multiplier) ** 2 * squared_sensitivity)))
    noised = add_noise(total.astype(np.int64).astype(object) * steps, noise_multiplier, draws)
    return noised / (steps * noise_multiplier * 2.0**-GRID_BITS)


def noised_counts(y: np.ndarray, num_classes: int, noise_multiplier: float, draws: ExactDraws) -> np.ndarray:
    """Releases the number of records of each class, float64 `[num_classes]`; zero for a class that noise could explain.

    Guarantee: as in `noised_sum`, for adding or removing one record. A class keeps its noised count if the count is
      above the noise (`classes_above_noise`).

    Raises:
      DataError: no class is left. This error is a function of the release alone.
    """
    found = noised_sum(np.bincount(y.astype(np.int64), minlength=num_classes), 1, noise_multiplier, draws)
    kept = classes_above_noise(found, noise_multiplier)
    return np.where(np.isin(np.arange(num_classes), kept), found, 0.0)


def one_hot(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns one-hot vectors of classes: float32 `[n, num_classes]`."""
    return np.eye(num_classes, dtype=np.float32)[labels]


class ExampleNetwork:
    """A network G(zeta, y) that makes features in [0, 1] from latent numbers zeta and a class y, and learns by Adam.

    Nothing that the network computes needs noise, provided that everything the network learns from was released.

    Attributes:
      weights: TensorFlow variables by name.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        latents: int,
        hidden_units: Sequence[int],
        learning_rate: float,
        draws: ExactDraws,
    ):
        """Draws initial weights.

        Args:
          num_features: number of features of an example.
          num_classes: number of classes.
          latents: number of latent numbers, each uniform in (-1, 1).
          hidden_units: number of units of each hidden layer.
          learning_rate: rate of Adam.
          draws: random draws, which need not be secret.
        """
        import tensorflow as tf

        from tff_pdp.models.dense import build_mlp

        self._latents, self._num_classes, self._draws = latents, num_classes, draws
        self._model = build_mlp((latents + num_classes,), num_features, hidden_units)
        initial = self._model.init(draws.below(2**32))
        self.weights: dict[str, Any] = {name: tf.Variable(tf.constant(value)) for name, value in initial.items()}
        self._optimizer = tf.keras.optimizers.Adam(learning_rate, beta_1=0.5)

    def inputs(self, labels: np.ndarray) -> np.ndarray:
        """Draws latent numbers, and puts one-hot classes beside them: float32 `[n, latents + classes]`."""
        zeta = 2 * draw_uniform(len(labels) * self._latents, self._draws) - 1
        zeta = zeta.reshape(len(labels), self._latents).astype(np.float32)
        return np.concatenate([zeta, one_hot(labels, self._num_classes)], axis=1)

    def examples(self, inputs: Any) -> Any:
        """Returns features, a float32 tensor `[n, features]` in [0, 1]."""
        import tensorflow as tf

        return tf.sigmoid(self._model.predict(self.weights, inputs))

    def learn(self, gradients: Sequence[Any]) -> None:
        """Takes a step of Adam with gradients in the order of `weights`."""
        self._optimizer.apply_gradients(zip(gradients, self.weights.values(), strict=True))

    def synthetic(self, counts: np.ndarray, shape: tuple[int, ...], settings: Generator) -> SyntheticExamples:
        """Makes the examples of a release, with labels in the proportions of `counts`.

        Args:
          counts: released counts of classes, float64 `[classes]`.
          shape: shape of an example.
          settings: number of examples and range of features.
        """
        labels = draw_labels(counts, settings.examples, self._draws)
        parts = [
            np.asarray(self.examples(self.inputs(labels[start : start + _ROWS])), np.float64)
            for start in range(0, len(labels), _ROWS)
        ]
        x = settings.low + np.concatenate(parts) * (settings.high - settings.low)
        return SyntheticExamples(np.clip(x, settings.low, settings.high).reshape(len(labels), *shape), labels)
