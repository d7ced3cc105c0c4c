"""Derives a model from another: some weights become constants, or the scaling of inputs becomes weights.

A model over fixed weights trains only its other weights, such as a head over a given body. A model with scaled inputs
takes raw examples when it is served.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import InitialWeights, Model, Weights
from tff_pdp.models.dropout import RowDraws
from tff_pdp.models.layers import Layer, RecordingWeights


def over_fixed_weights(
    model: Model,
    own: Mapping[str, np.ndarray],
    fixed: Weights,
    make_weights: Callable[[Weights], Weights] = lambda weights: weights,
) -> Model:
    """Returns a model whose only weights are `own`; it predicts with `make_weights({**fixed, **own})`.

    `tff_pdp.privacy.mechanisms.per_example` still records layers that use only own weights, so clipping is as fast as
    without fixed weights. The clipped gradient is the gradient w.r.t. the own weights.

    Args:
      model: model that computes the predictions.
      own: initial values of the returned model's weights, float32.
      fixed: weights that are constants and are not trained.
      make_weights: `fixed and own weights -> weights of model`; if the result cannot be recorded, clipping is slower.
    """

    def whole(weights: Weights) -> Weights:
        if isinstance(weights, RecordingWeights):
            return make_weights(_OwnOverFixed(weights, fixed))
        return make_weights({**fixed, **weights})

    return dataclasses.replace(
        model,
        init=lambda seed: {name: np.asarray(array, np.float32) for name, array in own.items()},
        predict=lambda weights, x: model.predict(whole(weights), x),
        training_predict=_with(model.training_predict, lambda weights, x: (whole(weights), x)),
        head=tuple(name for name in model.head if name in own),
    )


def _with(
    training_predict: Callable[[Weights, tf.Tensor, RowDraws], tf.Tensor] | None,
    prepared: Callable[[Weights, tf.Tensor], tuple[Weights, tf.Tensor]],
) -> Callable[[Weights, tf.Tensor, RowDraws], tf.Tensor] | None:
    """Returns `training_predict` of prepared weights and features; None if the model has no such function."""
    if training_predict is None:
        return None
    return lambda weights, x, draws: training_predict(*prepared(weights, x), draws)


class _OwnOverFixed(RecordingWeights):
    """Recorded own weights, together with fixed weights, whose use is not recorded."""

    def __init__(self, own: RecordingWeights, fixed: Weights):
        super().__init__({})
        self._own, self._fixed = own, fixed

    def __getitem__(self, name: str) -> Any:
        return self._fixed[name] if name in self._fixed else self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._fixed, *self._own))

    def __len__(self) -> int:
        return len(self._fixed) + len(self._own)

    def use(self, layer: Layer, names: tuple[str, ...], inputs: tf.Tensor) -> tf.Tensor:
        if any(name in self._fixed for name in names):
            # In a layer with both kinds, own weights are read by name, and so noted as untracked.
            return layer.apply(inputs, *(self[name] for name in names))
        return self._own.use(layer, names, inputs)


SHIFT, SCALE = "input/shift", "input/scale"


def with_scaled_inputs(model: Model) -> Model:
    """Returns `model` applied to `(x + shift) * scale`, with two more weights, shift and scale, of shape `input_shape`.

    The new weights are named `input/shift` and `input/scale`. Do not train the returned model: a gradient would change
    the scaling, too.
    """

    def init(seed: int) -> InitialWeights:
        unscaled = {SHIFT: np.zeros(model.input_shape, np.float32), SCALE: np.ones(model.input_shape, np.float32)}
        return {**unscaled, **model.init(seed)}

    def scaled(weights: Weights, x: tf.Tensor) -> tuple[Weights, tf.Tensor]:
        return weights, (x + weights[SHIFT]) * weights[SCALE]

    return dataclasses.replace(
        model,
        init=init,
        predict=lambda weights, x: model.predict(*scaled(weights, x)),
        training_predict=_with(model.training_predict, scaled),
    )
