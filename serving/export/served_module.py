"""Builds the graph that is served: a table from client ids to rows, stacked personal weights, and the model."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from serving.models import GLOBAL_ROW, PersonalModels
from tff_pdp.models.base import Model, Weights

# The vocabulary's first line, so that the others are numbered from one; TensorFlow refuses empty lines and empty files.
GLOBAL_ID = "<global>"
_GLOBAL_LINE = 0
# The output with names of classes.
CLASS = "class"


class ServedModule(tf.Module):
    """The served module: personal weights are rows of stacks, and each example is predicted with its client's row.

    The vocabulary is a file with a line for the global model, followed by a line with each client's id. The checkpoint
    has the keys `rows`, `shared/<i>` and `stacked/<i>`, where i numbers the weights in the sorted order of their names.

    Attributes:
      shared: variables of the weights that all clients share.
      stacked: variables `[rows, *weight_shape]` of the personal weights.
      rows: variable int32 `[1 + clients]`; for each line of the vocabulary, the number of the line's row in the stacks.
    """

    def __init__(self, models: PersonalModels, vocabulary_path: Path):
        """Builds the variables, and a lookup table that reads the vocabulary file, which `write_vocabulary` writes."""
        super().__init__(name="served_models")
        self._models = models
        self.shared = [tf.Variable(tf.constant(models.shared[name])) for name in sorted(models.shared)]
        self.stacked = [tf.Variable(tf.constant(models.stacked[name])) for name in sorted(models.stacked)]
        self.rows = tf.Variable(tf.constant(np.concatenate([[GLOBAL_ROW], models.rows]), tf.int32))
        # A file, not constants: a graph over 2 GB cannot be saved, and ids in a file can be inspected.
        self._lines = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(vocabulary_path),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            default_value=_GLOBAL_LINE,
        )

    def serve(self, client_id: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """Predicts each example with the weights of its client.

        Args:
          client_id: string `[batch]`; clients may be mixed and may repeat.
          x: float32 `[batch, *input_shape]`, finite.

        Returns:
          `probabilities` float32 `[batch, num_classes]`, or for a regression `values` float32 `[batch]`;
          `personalized` bool `[batch]`, false where the client is unknown and the global model answered; and, if
          classes have names, `class` string `[batch]`, the name of the class with the largest probability.
        """
        model = self._models.model
        client_id, x = _checked(client_id, x, model)
        line = self._lines.lookup(client_id)
        name, shape = answers_of(model)
        answers = tf.ensure_shape(model.answers(self._outputs(line, x)), shape)
        outputs = {name: answers, "personalized": tf.not_equal(line, _GLOBAL_LINE)}
        if self._models.class_names is not None:
            outputs[CLASS] = tf.gather(tf.constant(self._models.class_names), tf.argmax(answers, axis=-1))
        return outputs

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the text for each class in answers."""
        return self._models.labels

    def _outputs(self, line: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        shared = {name: one.read_value() for name, one in zip(sorted(self._models.shared), self.shared, strict=True)}
        if not self.stacked:
            return self._models.model.predict(self._weights(shared, {}), x)
        row = tf.gather(self.rows, line)
        stacks = zip(sorted(self._models.stacked), self.stacked, strict=True)
        own = {name: tf.gather(stack, row) for name, stack in stacks}

        def predict_one(example: tuple[dict[str, tf.Tensor], tf.Tensor]) -> tf.Tensor:
            own_of_one, one = example
            return self._models.model.predict(self._weights(shared, own_of_one), one[tf.newaxis])[0]

        # Vectorised, a layer of shared weights is one product over the whole batch.
        return tf.vectorized_map(predict_one, (own, x))

    def _weights(self, shared: Weights, own: Weights) -> Weights:
        make_weights = self._models.make_weights
        return {**shared, **own} if make_weights is None else make_weights(shared, own)


def write_vocabulary(path: Path, models: PersonalModels) -> None:
    """Writes the vocabulary file: a line for the global model, then a line with each client's id, in order."""
    path.write_text("".join(f"{line}\n" for line in (GLOBAL_ID, *models.client_ids)), encoding="utf-8", newline="")


def answers_of(model: Model) -> tuple[str, list[int | None]]:
    """Returns the key of a model's answers among a signature's outputs, and the answers' shape (None: batch size)."""
    return ("probabilities", [None, model.num_classes]) if model.num_classes else ("values", [None])


def _checked(client_id: tf.Tensor, x: tf.Tensor, model: Model) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds checks to the graph, so that every server makes them: rank and shape, equal batch sizes, finite values."""
    x = tf.ensure_shape(x, [None, *model.input_shape])
    same_batch = tf.debugging.assert_equal(
        tf.shape(client_id)[0],
        tf.shape(x)[0],
        message="client_id and the examples must have the same batch size: send one client id for each example",
    )
    with tf.control_dependencies([same_batch]):
        return tf.identity(client_id), tf.debugging.check_numerics(x, "x must be finite")
