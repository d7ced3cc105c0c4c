"""Checks records before a release, brings features into the public range, and pools images."""

import itertools
import math
from typing import Annotated

import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.synthetic.base import Generator, check_labels

# A release of this many values takes some 25 seconds to draw.
MOST_VALUES = 10**6


class PooledGenerator(Generator):
    """Settings of a generator that can average images over squares of pixels before its release.

    Attributes:
      pool: side, in pixels, of the squares of an image over which features are averaged before the release. A synthetic
        image has each average in all places of the square, so that its shape is that of the records.
    """

    pool: Annotated[int, Meta(ge=1, le=64)] = 1

    def pooled_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an example after pooling.

        Raises:
          ConfigError: the example is no image whose sides are multiples of `pool`.
        """
        if self.pool == 1:
            return shape
        if len(shape) < 2 or shape[0] % self.pool or shape[1] % self.pool:
            raise ConfigError(
                f"pool is {self.pool}, but examples have the shape {list(shape)}: pooling needs images whose height "
                "and width are multiples of it"
            )
        return (shape[0] // self.pool, shape[1] // self.pool, *shape[2:])

    def rows(self, x: np.ndarray) -> np.ndarray:
        """Clips features to the public range, pools images, and flattens examples: float64 `[n, features]`.

        Guarantee: each row is a function of its own example alone, to the last bit, because every operation works on
          single elements, and IEEE 754 rounds such operations in only one way. Every value is between `low` and `high`.
          Missing values count as the middle of the range.

        Args:
          x: examples `[n, *input_shape]`.
        """
        rows = np.nan_to_num(x.astype(np.float64), nan=(self.low + self.high) / 2, posinf=np.inf, neginf=-np.inf)
        rows = np.clip(rows, self.low, self.high)
        if self.pool > 1:
            places = list(itertools.product(range(self.pool), repeat=2))
            # Library sums over axes may add in an order that depends on the number of rows.
            squares = sum(rows[:, down :: self.pool, right :: self.pool] for down, right in places)
            # Rounding must not bring an average out of the range.
            rows = np.clip(np.asarray(squares) / len(places), self.low, self.high)
        return rows.reshape(len(x), math.prod(rows.shape[1:]))

    def examples_of(self, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns examples of the records' shape: pooled features in the range, each average in all of its square.

        Args:
          rows: `[n, features]`, features after pooling.
          shape: shape of one record.
        """
        examples = np.clip(rows, self.low, self.high).reshape(len(rows), *self.pooled_shape(shape))
        return examples if self.pool == 1 else examples.repeat(self.pool, axis=1).repeat(self.pool, axis=2)


def check_records(x: np.ndarray, y: np.ndarray, settings: PooledGenerator) -> int:
    """Checks shapes and labels; returns the number of features after pooling.

    Raises:
      ConfigError: an example has no features or cannot be pooled, or there are not as many labels as examples.
      DataError: a label is out of range.
    """
    num_features = math.prod(settings.pooled_shape(x.shape[1:]))
    if not num_features:
        raise ConfigError("the examples have no features")
    check_labels(x, y, settings.num_classes)
    return num_features
