"""A model that carries the scaling of its inputs in its weights, as it is served: what comes in are raw examples."""

import dataclasses

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import InitialWeights, Model, Weights

SHIFT, SCALE = "input/shift", "input/scale"


def with_scaled_inputs(model: Model) -> Model:
    """Returns the model over `(x + shift) * scale`, where these two are weights of it, `[*input_shape]`.

    They are called `input/shift` and `input/scale`. Not to be trained: a gradient would move the scaling, too.
    """

    def init(seed: int) -> InitialWeights:
        unscaled = {SHIFT: np.zeros(model.input_shape, np.float32), SCALE: np.ones(model.input_shape, np.float32)}
        return {**unscaled, **model.init(seed)}

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        return model.predict(weights, (x + weights[SHIFT]) * weights[SCALE])

    return dataclasses.replace(model, init=init, predict=predict)
