"""Builds the model of an experiment, with the loss and the metric that the experiment chooses."""

import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from tff_pdp.data.manifest import Manifest
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.kinds import LOSSES, METRICS, MODELS
from tff_pdp.kinds import Kinds, settings_of
from tff_pdp.models.average_precision import RANKING
from tff_pdp.models.base import Model
from tff_pdp.models.independence import check_model_treats_examples_apart
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR, ExampleMetric, Metric
from tff_pdp.settings import CountOrZero, read_settings

# Arguments of a model's function besides its settings.
SHAPES = ("input_shape", "num_classes")
# Keys of section `model` that every kind has, unless a kind has a setting of this name.
OF_EVERY_KIND = ("loss", "metric")
_ARGUMENTS = ("outputs", "y")
# Metrics that every model of classes, or every regression, is measured by already.
_ALWAYS = {ACCURACY.name: True, MEAN_SQUARED_ERROR.name: False}
_OF_TWO_CLASSES = ("hinge", "binary_cross_entropy")
# Models that have passed the check, by all that decides them.
_checked: set[str] = set()


def build_model(config: ExperimentConfig) -> Model:
    """Builds the experiment's model, with its loss and metric.

    The function of a kind from outside of this package may return a `tf.keras.Model`. Keras draws its initial weights
    from `model.seed`: Keras's and TensorFlow's global seeds are set to this seed, and Python's and NumPy's are set back
    afterwards. For a private plan, what comes from outside is checked once: examples must not influence each other.

    Raises:
      ConfigError: the kind or one of its settings is unknown, or out of range; or a model from outside is refused.
    """
    given = dict(config.model)
    kind = given.pop("kind", None)
    given.pop("seed", None)
    seed = model_seed(config)
    if not isinstance(kind, str):
        raise ConfigError(f"missing key model.kind: one of {', '.join(MODELS.own)}, or module:name")
    builder = MODELS.find(kind)
    own = settings_of(builder, SHAPES)
    chosen = {name: given.pop(name) for name in OF_EVERY_KIND if name in given and name not in own.__struct_fields__}
    settings = msgspec.structs.asdict(read_settings(own, given, "the experiment", "model"))
    shape, num_classes = data_shapes(config)
    if kind in MODELS.own:
        model = builder(shape, num_classes, **settings)
    else:
        with _seeded(seed):
            model = _as_model(kind, builder(shape, num_classes, **settings), shape, num_classes)
    for name, choose in (("loss", _with_loss), ("metric", _with_metric)):
        if chosen.get(name) is not None:
            model = choose(model, chosen[name])
    if (kind not in MODELS.own or "loss" in chosen) and config.privacy.is_private:
        decisive = json.dumps([config.model, shape, num_classes], sort_keys=True, default=str)
        if decisive not in _checked:
            check_model_treats_examples_apart(model)
            _checked.add(decisive)
    return model


def data_shapes(config: ExperimentConfig) -> tuple[tuple[int, ...], int]:
    """Returns the shape of an example and the number of classes: the settings' or, if these leave it open, the data's.

    Raises:
      DataError: the settings leave a number open, and the client dataset has not been prepared or is damaged.
    """
    shape, num_classes = tuple(config.data.input_shape), config.data.num_classes
    if shape and num_classes is not None:
        return shape, num_classes
    features = Manifest.load(config.clients_folder).features
    return shape or features.shape, features.num_classes if num_classes is None else num_classes


def model_seed(config: ExperimentConfig) -> int:
    """Returns the seed of the model's initial weights, 0 by default.

    Raises:
      ConfigError: the seed is not a whole number of at least 0.
    """
    return read_settings(CountOrZero, config.model.get("seed", 0), "the experiment", "model.seed")


def _as_model(kind: str, built: Any, shape: tuple[int, ...], num_classes: int) -> Model:
    if isinstance(built, Model):
        return built
    if isinstance(built, tf.keras.Model):
        # Only those who use Keras pay for its import.
        from tff_pdp.models.keras.convert import from_keras

        return from_keras(built, num_classes, input_shape=shape, name=kind)
    raise ConfigError(
        f"model.kind {kind!r} returned {type(built).__name__}: return a tff_pdp.models.base.Model or a tf.keras.Model"
    )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Has Keras draw from `seed` in the `with` block, and sets Python's and NumPy's generators back afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    tf.keras.utils.set_random_seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _chosen(
    kinds: Kinds[Callable[..., tf.Tensor]], given: Any, key: str
) -> tuple[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]:
    """Returns the kind of a loss or metric, and the function with its settings."""
    settings = {"kind": given} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("kind"), str):
        raise ConfigError(f"{key}: {given!r} must be a name, or a mapping with the key kind")
    rest = {name: value for name, value in settings.items() if name != "kind"}
    kind = settings["kind"]
    function = kinds.find(kind)
    read = read_settings(settings_of(function, _ARGUMENTS), rest, "the experiment", key)
    return kind, functools.partial(function, **msgspec.structs.asdict(read))


def _with_loss(model: Model, given: Any) -> Model:
    kind, loss = _chosen(LOSSES, given, "model.loss")
    if kind in _OF_TWO_CLASSES and model.num_classes != 2:
        raise ConfigError(f"model.loss {kind!r} separates 2 classes, but data.num_classes is {model.num_classes}")
    _check_by_example(model, loss, f"model.loss {kind!r}")
    return dataclasses.replace(model, output_loss=loss)


def _with_metric(model: Model, given: Any) -> Model:
    kind = given if isinstance(given, str) else None
    if kind in _ALWAYS:
        if _ALWAYS[kind] != bool(model.num_classes):
            raise ConfigError(f"model.metric {kind!r} does not suit data.num_classes {model.num_classes}")
        return dataclasses.replace(model, ranking=None, example_metric=None)
    if kind == RANKING.metric.name:
        if model.num_classes != 2:
            raise ConfigError(f"model.metric {kind!r} ranks 2 classes, but data.num_classes is {model.num_classes}")
        return dataclasses.replace(model, ranking=RANKING, example_metric=None)
    kind, figure = _chosen(METRICS, given, "model.metric")
    name = kind.rpartition(":")[2]
    if name in ("loss", *(one.example_name for one in (ACCURACY, MEAN_SQUARED_ERROR))):
        raise ConfigError(f"model.metric: {name!r} is the name of a figure that is measured already; rename {kind}")
    _check_by_example(model, figure, f"model.metric {kind!r}")
    is_better = not getattr(METRICS.find(kind), "lower_is_better", False)
    metric = ExampleMetric(Metric(name, name, higher_is_better=is_better), figure)
    return dataclasses.replace(model, ranking=None, example_metric=metric)


def _check_by_example(model: Model, figure: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], key: str) -> None:
    """Checks that a loss or metric takes the model's outputs and labels, and gives one number for each example."""
    # Another number than that of the classes, so that no shapes agree by chance.
    rows = model.num_classes + 2
    outputs = tf.zeros([rows, model.num_classes] if model.num_classes else [rows])
    labels = tf.constant((np.arange(rows) % max(model.num_classes, 1)).astype(model.label_dtype))
    try:
        shape = tuple(figure(outputs, labels).shape)
    except (tf.errors.InvalidArgumentError, ValueError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{key} cannot be computed for outputs {tuple(outputs.shape)} and labels ({rows},) of type "
            f"{labels.dtype.name}; it does not suit data.num_classes {model.num_classes} ({reason})"
        ) from None
    if shape != (rows,):
        raise ConfigError(f"{key} gives values of shape {shape} for {rows} examples, not one for each example")
