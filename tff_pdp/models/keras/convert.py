"""Makes a `Model` of a Keras model: pure functions of named weights, with Keras's own layers inside."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models.base import InitialWeights, Model, Weights, default_loss
from tff_pdp.models.dropout import RowDraws
from tff_pdp.models.independence import impurities
from tff_pdp.models.keras.closed_forms import Form, closed_form
from tff_pdp.models.keras.masks import Masks
from tff_pdp.models.keras.refusals import check_layers
from tff_pdp.models.keras.variables import (
    Attribute,
    attributes_set,
    attributes_with,
    named_layers,
    named_variables,
    with_values,
)
from tff_pdp.models.layers import RecordingWeights

_ACTIVATIONS: Any = tf.keras.activations
_LEFT_OUT = (_ACTIVATIONS.softmax, _ACTIVATIONS.sigmoid)
_RANDOM: Any = tf.keras.__internal__.layers.BaseRandomLayer
# Different numbers of rows, with which a layer is tried out; no other size of a model is likely to follow them.
_TRIED_ROWS = (3, 7)
# Largest difference between closed forms and Keras's layers, relative to the largest output.
_ROUNDING = 1e-4


def from_keras(
    model: tf.keras.Model,
    num_classes: int | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    name: str | None = None,
) -> Model:
    """Makes a `Model` of a Keras model, whose own layers compute the predictions.

    Initial weights are the values that the Keras model has now, for every seed. They are public, and so are frozen
    weights (`trainable=False`), which become constants. The result does not follow later changes of the Keras model.
    Compiled losses and metrics are not used.

    A final softmax, or the sigmoid of a model of two classes, is left out, because losses here take logits. Dropout is
    active in training alone, with masks of each example's own (`tff_pdp.models.dropout`). Other layers are called with
    `training=False`.

    The head is the last layer with weights. Gradients of single examples have a closed form for Dense, Conv2D,
    Embedding, LayerNormalization, GroupNormalization, LSTM, GRU and SimpleRNN; with other layers, a line in the log
    names the weights that make training slower. Recurrent layers need a known number of time steps.

    Args:
      model: functional, sequential or subclassed model with one input and one output, of float32 weights. Inputs may be
        whole numbers, such as ids for an Embedding, below 2**24: examples are stored as float32.
      num_classes: number of classes; 0 for a regression. By default the number of outputs, or a regression for one
        output without a sigmoid. A model of two classes may have two outputs or one.
      input_shape: shape of one example, for a model that has not been built.
      name: name for messages; by default the Keras model's.

    Raises:
      ConfigError: a layer mixes examples, such as BatchNormalization, keeps state, or draws random numbers other than
        dropout masks; or shapes or types do not fit. The message names the layer.

    >>> keras = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="softmax", input_shape=(4,))])
    >>> made = from_keras(keras)
    >>> made.num_classes, made.head
    (3, ('dense/kernel', 'dense/bias'))
    """
    if not isinstance(model, tf.keras.Model):
        raise ConfigError(f"from_keras needs a tf.keras.Model, not {type(model).__name__}")
    shape = _built_shape(model, input_shape)
    layers = named_layers(model)
    check_layers(layers)
    converted = _Converted(model, shape, layers)
    outputs = converted.tried_outputs()
    units = outputs.shape[1] if outputs.ndim == 2 else 0
    final = _final_activation(model)
    if num_classes is None:
        num_classes = 2 if units == 1 and final is _ACTIVATIONS.sigmoid else units if units > 1 else 0
    is_one_logit = num_classes == 2 and units == 1
    if units != (num_classes or 1) and not is_one_logit:
        raise ConfigError(
            f"the Keras model {model.name!r} has outputs of shape {outputs.shape[1:]}, and {num_classes or 1} "
            f"output(s) are needed for {num_classes} classes: change the last layer, or data.num_classes"
        )
    if num_classes and final in _LEFT_OUT:
        converted.leave_out_activation()
        outputs = converted.tried_outputs()
    if num_classes and _are_probabilities(outputs):
        raise ConfigError(
            f"the outputs of the Keras model {model.name!r} are probabilities, but losses here take logits: leave out "
            "the softmax or sigmoid at the end"
        )

    def shaped(values: tf.Tensor) -> tf.Tensor:
        if is_one_logit:
            return tf.concat([tf.zeros_like(values), values], axis=1)
        return values if num_classes else values[:, 0]

    def training_predict(weights: Weights, x: tf.Tensor, draws: RowDraws) -> tf.Tensor:
        return shaped(converted(weights, x, draws))

    converted.choose_forms(outputs)
    initial = converted.initial
    return Model(
        name=name or model.name,
        input_shape=shape,
        num_classes=num_classes,
        init=lambda seed: dict(initial),
        predict=lambda weights, x: shaped(converted(weights, x)),
        head=_head(model, layers, converted),
        output_loss=default_loss(num_classes),
        training_predict=training_predict if converted.has_masks else None,
    )


class _Converted:
    """A Keras model as a function `(weights, x, draws) -> outputs`.

    Attributes:
      initial: values of the trainable weights, by name.
      names: names of the trainable variables, by the variables' ids.
    """

    def __init__(self, model: tf.keras.Model, shape: tuple[int, ...], layers: Mapping[str, tf.keras.layers.Layer]):
        self._model, self._shape, self._layers = model, shape, layers
        variables = named_variables(model)
        trainable = {id(variable) for variable in model.trainable_weights}
        wrong = [name for name, one in variables.items() if id(one) in trainable and one.dtype != tf.float32]
        if wrong:
            raise ConfigError(f"Keras weight {wrong[0]!r} is {variables[wrong[0]].dtype.name}; weights must be float32")
        if not trainable:
            raise ConfigError(f"the Keras model {model.name!r} has no trainable weights")
        self.names = {id(one): name for name, one in variables.items() if id(one) in trainable}
        self.initial: InitialWeights = {name: one.numpy() for name, one in variables.items() if id(one) in trainable}
        self._frozen = {id(one): one.numpy() for one in variables.values() if id(one) not in trainable}
        self._attributes = attributes_with(model, variables)
        self._forms: dict[str, Form] = {}
        self._activation: list[Attribute] = []
        # Step after step in the graph: TensorFlow can stack neither the gradients of Keras's loops nor those of cuDNN.
        recurrent = [layer for layer in layers.values() if isinstance(layer, tf.keras.layers.RNN)]
        self._steps = [
            Attribute(layer, name, value)
            for layer in recurrent
            for name, value in (("unroll", True), ("_could_use_gpu_kernel", False))
        ]
        self._random = [layer for layer in layers.values() if isinstance(layer, _RANDOM)]
        self._dtype = model.inputs[0].dtype if model.inputs else tf.float32

    def __call__(self, weights: Weights, x: tf.Tensor, draws: RowDraws | None = None) -> tf.Tensor:
        own_variables = {id(one) for path in self._forms for one in self._layers[path].weights}

        def value(variable: int) -> Any:
            # Layers with a form read their weights by themselves, so that uses are recorded.
            if variable in self.names and variable not in own_variables:
                return weights[self.names[variable]]
            return tf.constant(self._frozen[variable]) if variable in self._frozen else None

        places = itertools.count()
        replaced = [one._replace(value=with_values(one, value)) for one in self._attributes]
        forms = [Attribute(self._layers[path], "call", form(weights)) for path, form in self._forms.items()]
        masks = [Attribute(one, "_random_generator", Masks(one, draws, places)) for one in self._random if draws]
        with attributes_set([*replaced, *forms, *masks, *self._steps, *self._activation]):
            outputs = self._model(tf.cast(x, self._dtype), training=draws is not None)
        if not isinstance(outputs, tf.Tensor):
            raise ConfigError(f"the Keras model {self._model.name!r} has several outputs, and may have one")
        return outputs

    @property
    def has_masks(self) -> bool:
        """True if training differs from prediction: a layer drops values, or is not one of Keras's own."""
        return any(_drops(layer) for layer in self._random) or any(
            layer._expects_training_arg and not type(layer).__module__.startswith("keras.")
            for path, layer in self._layers.items()
            if path
        )

    def leave_out_activation(self) -> None:
        """Leaves out the activation of the last layer."""
        self._activation = [Attribute(_final_layer(self._model), "activation", _ACTIVATIONS.linear)]

    def tried_outputs(self) -> np.ndarray:
        """Returns the outputs of made-up examples.

        Raises:
          ConfigError: the model cannot be called, or assigns a variable.
        """
        try:
            return self(self._tried_weights(), self._tried_examples(_TRIED_ROWS[-1])).numpy()
        except ConfigError:
            raise
        except Exception as error:
            # A variable that a layer assigns is a tensor here, which has no such method.
            keeps_state = isinstance(error, AttributeError) and "assign" in str(error)
            raise ConfigError(
                f"the Keras model {self._model.name!r} "
                + ("assigns a variable when it is called, so it keeps state" if keeps_state else "cannot be called")
                + f" (examples of shape {self._shape}): {_first_line(error)}"
            ) from error

    def choose_forms(self, expected: np.ndarray) -> None:
        """Chooses the layers that are computed by closed forms, and checks that the function is pure.

        `expected` has the outputs that Keras's layers give for the made-up examples.

        Raises:
          ConfigError: the model keeps state, draws random numbers that are not dropout masks, or drops values of rows
            that are not examples.
        """
        found = {path: closed_form(layer, self.names) for path, layer in self._layers.items() if path}
        self._forms = {path: form for path, form in found.items() if form is not None}
        # Inside of a wrapper, rows may be the time steps of all examples.
        wrong = set().union(*(self._of_other_rows(rows) for rows in _TRIED_ROWS))
        self._forms = {path: form for path, form in self._forms.items() if path not in wrong}
        scale = max(1.0, float(np.abs(expected).max()))
        if not np.allclose(self.tried_outputs(), expected, rtol=0, atol=_ROUNDING * scale):
            self._forms = {}
        held, operations = self._impurities()
        if self._forms and (held or operations):
            # Another layer may compute with a weight of a layer that has a form.
            self._forms = {}
            held, operations = self._impurities()
        if held or operations:
            raise ConfigError(
                f"the Keras model {self._model.name!r} {'reads or writes the variable ' + held[0] if held else ''}"
                f"{' and ' if held and operations else ''}{'has the operation ' + operations[0] if operations else ''}"
                ", so it is no function of weights and examples alone: keep variables as attributes of layers, and "
                "leave out counters, state and random numbers other than Dropout"
            )
        if self.has_masks:
            self._check_masks()

    def _impurities(self) -> tuple[list[str], list[str]]:
        weights = {name: tf.constant(array) for name, array in self.initial.items()}
        return impurities(lambda x: self(weights, x), self._shape)

    def _check_masks(self) -> None:
        rows = _TRIED_ROWS[-1]
        draws = RowDraws(tf.constant([1, 2], tf.int64), tf.range(rows, dtype=tf.int64))
        try:
            self(self._tried_weights(), self._tried_examples(rows), draws)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise ConfigError(
                f"the Keras model {self._model.name!r} drops values of rows that are not examples, or of a size that "
                f"is not known: use Dropout outside of TimeDistributed ({_first_line(error)})"
            ) from None

    def _of_other_rows(self, rows: int) -> set[str]:
        """Returns the paths of layers with a form that see other rows than the examples."""
        recording = RecordingWeights(self._tried_weights())
        self(recording, self._tried_examples(rows))
        names = {name for use in recording.uses if use.output.shape[0] != rows for name in use.names}
        return {path for path in self._forms if names & {self.names.get(id(one)) for one in self._layers[path].weights}}

    def _tried_weights(self) -> dict[str, tf.Tensor]:
        """Returns weights that are not zero, as biases are at first."""
        return {
            name: tf.constant(array + 0.01 * _made_up(array.shape, 1 + place))
            for place, (name, array) in enumerate(self.initial.items())
        }

    def _tried_examples(self, rows: int) -> tf.Tensor:
        values = _made_up((rows, *self._shape), 0.5)
        # Ids: zeros and ones are valid for every table with two rows.
        has_ids = any(isinstance(layer, tf.keras.layers.Embedding) for layer in self._layers.values())
        return tf.constant((values > 0).astype(np.float32) if has_ids or self._dtype.is_integer else values)


def _made_up(shape: tuple[int, ...], start: float) -> np.ndarray:
    """Returns float32 numbers between -1 and 1 that look random."""
    numbers = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float64)
    return np.sin(numbers * numbers * 0.7 + start).astype(np.float32).reshape(shape)


def _drops(layer: Any) -> bool:
    rates = (getattr(layer, name, 0) for name in ("rate", "dropout", "recurrent_dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _built_shape(model: tf.keras.Model, input_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Builds the model if need be, and returns the shape of one example."""
    inputs = model.inputs or []
    if len(inputs) > 1:
        raise ConfigError(f"the Keras model {model.name!r} has {len(inputs)} inputs, and may have one")
    own = tuple(inputs[0].shape[1:]) if inputs else None
    if own is None or None in own:
        if input_shape is None:
            raise ConfigError(
                f"the Keras model {model.name!r} does not say the shape of one example"
                f"{f', only {own}' if own else ''}: begin it with tf.keras.Input(shape), or pass input_shape"
            )
        own = tuple(input_shape) if own is None or len(own) == len(input_shape) else own
        try:
            model(tf.zeros([1, *own], inputs[0].dtype if inputs else tf.float32), training=False)
        except Exception as error:
            raise ConfigError(
                f"the Keras model {model.name!r} cannot be called with examples of shape {own}: {_first_line(error)}"
            ) from error
    if input_shape is not None and tuple(input_shape) != own:
        raise ConfigError(
            f"the Keras model {model.name!r} takes examples of shape {own}, and the data have {tuple(input_shape)}"
        )
    return own


def _final_layer(model: Any) -> Any:
    """Returns the layer that gives the model's outputs; the model itself if that is not known."""
    if not getattr(model, "_is_graph_network", False):
        return model
    layer = model.outputs[0]._keras_history.layer
    return _final_layer(layer) if isinstance(layer, tf.keras.Model) else layer


def _final_activation(model: Any) -> Callable[..., Any] | None:
    return getattr(_final_layer(model), "activation", None)


def _are_probabilities(outputs: np.ndarray) -> bool:
    are_shares = bool((outputs >= 0).all() and (outputs <= 1).all())
    return are_shares and (outputs.shape[1] == 1 or bool(np.allclose(outputs.sum(axis=1), 1, atol=1e-5)))


def _head(model: tf.keras.Model, layers: Mapping[str, tf.keras.layers.Layer], converted: _Converted) -> tuple[str, ...]:
    """Returns the names of the weights of the last layer that has any; of a model inside, the last layer's."""
    paths = {id(layer): path for path, layer in layers.items()}

    def last(layer: Any) -> list[str]:
        if isinstance(layer, tf.keras.Model):
            inner = [one for one in layer.layers if one.trainable_weights and id(one) in paths]
            if inner:
                return last(inner[-1])
        return [converted.names[id(one)] for one in layer.trainable_weights if id(one) in converted.names]

    return tuple(last(model)) or tuple(converted.initial)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
