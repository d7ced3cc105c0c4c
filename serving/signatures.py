"""The graph that is served: a table from client ids to rows, stacked personal weights, and the model over them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from serving import layout
from tff_pdp.models.base import Model

Arrays = Mapping[str, np.ndarray]

GLOBAL_ROW = 0
# Names row 0 in the vocabulary, so that line numbers are rows; TensorFlow refuses an empty line, and an empty file.
GLOBAL_ID = "<global>"


class PersonalizedModule(tf.Module):
    """One model for all clients: weights that clients own are stacked, and each example gathers its client's row.

    Row 0 of every stack holds the global weights; a client id that is not in the vocabulary, or is empty, gets row 0.
    Weights that no client owns are held once.
    """

    def __init__(
        self,
        model: Model,
        global_weights: Arrays,
        personal_weights: Mapping[str, Arrays],
        vocabulary_path: Path,
    ):
        """Builds the variables and the lookup table.

        Args:
          model: the model that every client runs.
          global_weights: all weights of the model.
          personal_weights: for each client the weights it owns; every client owns the same names.
          vocabulary_path: one line for each row: `GLOBAL_ID`, then the client ids in the order of `personal_weights`.
        """
        super().__init__(name="personalized_model")
        self._model = model
        clients = list(personal_weights.values())
        owned = set(clients[0]) if clients else set()
        self._shared = {
            name: tf.Variable(tf.constant(value)) for name, value in global_weights.items() if name not in owned
        }
        self._stacked = {
            name: tf.Variable(tf.stack([global_weights[name], *(client[name] for client in clients)]))
            for name in sorted(owned)
        }
        # A file, not constants: a graph over 2 GB cannot be saved, and ids in a file can be inspected.
        self._rows = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(vocabulary_path),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            default_value=GLOBAL_ROW,
        )

    def serve(self, client_id: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """Predicts each example with the weights of its client.

        Args:
          client_id: string `[batch]`; clients may be mixed and may repeat.
          x: float32 `[batch, *input_shape]`, finite.

        Returns:
          `probabilities` float32 `[batch, num_classes]` (of a regression: `values` float32 `[batch]`), and
          `personalized` bool `[batch]`, false where the client is unknown and the global model answered.
        """
        client_id, x = self._checked(client_id, x)
        row = self._rows.lookup(client_id)
        answers = self._model.answers(self._outputs(row, x))
        name, shape = answers_of(self._model)
        return {name: tf.ensure_shape(answers, shape), "personalized": tf.not_equal(row, GLOBAL_ROW)}

    def _checked(self, client_id: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Checks in the graph, so that every server makes them: rank and shape, equal batch sizes, finite values."""
        x = tf.ensure_shape(x, [None, *self._model.input_shape])
        same_batch = tf.debugging.assert_equal(
            tf.shape(client_id)[0],
            tf.shape(x)[0],
            message="client_id and x must have the same batch size: send one client id for each example",
        )
        with tf.control_dependencies([same_batch]):
            return tf.identity(client_id), tf.debugging.check_numerics(x, "x must be finite")

    def _outputs(self, row: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        if not self._stacked:
            return self._model.predict(self._read_shared(), x)
        shared = self._read_shared()
        own = {name: tf.gather(stack, row) for name, stack in self._stacked.items()}

        def predict_one(example: tuple[dict[str, tf.Tensor], tf.Tensor]) -> tf.Tensor:
            own_weights, one = example
            return self._model.predict({**shared, **own_weights}, one[tf.newaxis])[0]

        return tf.vectorized_map(predict_one, (own, x))

    def _read_shared(self) -> dict[str, tf.Tensor]:
        return {name: variable.read_value() for name, variable in self._shared.items()}


def answers_of(model: Model) -> tuple[str, list[int | None]]:
    """Returns the name of a model's answers in a signature, and their shape."""
    return ("probabilities", [None, model.num_classes]) if model.num_classes else ("values", [None])


def build_signatures(module: PersonalizedModule, input_shape: tuple[int, ...]) -> dict[str, object]:
    """Traces `module.serve` once and names it for every signature of the export.

    The first dimension of each input is open: TensorFlow Serving needs that for row JSON and for batching.
    """
    traced = tf.function(module.serve).get_concrete_function(
        tf.TensorSpec([None], tf.string, name="client_id"),
        tf.TensorSpec([None, *input_shape], tf.float32, name="x"),
    )
    return {name: traced for name in layout.SIGNATURE_NAMES}
