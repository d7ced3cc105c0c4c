"""Gives Keras layers dropout masks of each example's own, in place of the random numbers of Keras's generators."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.models.dropout import RowDraws, dropout


class Masks:
    """A generator for one layer, in the form that Keras's layers ask for.

    Args:
      layer: the layer that asks.
      draws: random words of the batch's examples.
      places: numbers for the model's masks, in the order in which they are asked for.
    """

    def __init__(self, layer: Any, draws: RowDraws, places: "itertools.count[int]"):
        self._layer, self._draws, self._places = layer, draws, places

    def dropout(self, inputs: tf.Tensor, rate: float, noise_shape: Any = None) -> tf.Tensor:
        """Drops values of `inputs [batch, ...]`; see `tff_pdp.models.dropout.dropout`."""
        sizes = self._sizes(inputs, noise_shape)
        return dropout(inputs, float(rate), self._draws, next(self._places), sizes)

    def _sizes(self, inputs: tf.Tensor, noise_shape: Any) -> list[int]:
        own: list[Any] = inputs.shape[1:].as_list()
        if noise_shape is None:
            return own
        # Keras has put the sizes of inputs in place of None; a size that is a tensor is one of them.
        given: Sequence[Any] = self._layer.noise_shape if isinstance(noise_shape, tf.Tensor) else noise_shape
        return [asked if isinstance(asked, int) else size for asked, size in zip(given[1:], own, strict=True)]
