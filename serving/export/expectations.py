"""Computes the right answers for an export's signatures from the model itself, without the export."""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from serving.export.model_checks import weight_bytes_per_example
from serving.export.served_module import CLASS, answers_of
from serving.export.signatures import examples_signature, takes_images
from serving.models import GLOBAL_ROW, Arrays, PersonalModels
from serving.saved_model import layout
from serving.saved_model.servable import load_servable
from serving.saved_model.warmup import example
from serving.verify.answers import TOLERANCE, check_answers
from serving.verify.fresh_process import Expectation
from tff_pdp.models.base import Model

NUM_EXAMPLES = 8
MAX_REFERENCES = 32
# A batch that gathers full models takes much memory.
_MAX_BATCH, _MAX_BATCH_BYTES = 64, 1 << 28


def examples_for(model: Model) -> np.ndarray:
    """Returns random examples (no client's data), float32 `[NUM_EXAMPLES, *input_shape]`, uniform in `[0, 1)`."""
    return np.random.default_rng(0).random((NUM_EXAMPLES, *model.input_shape), np.float32)


def default_references(models: PersonalModels) -> dict[str, Arrays]:
    """Returns the weights of the global model (id "") and of the first `MAX_REFERENCES` clients, by client id."""
    numbers = {"": GLOBAL_ROW, **dict(zip(models.client_ids[:MAX_REFERENCES], models.rows.tolist(), strict=False))}
    with tf.device("/CPU:0"):
        return {client_id: models.weights_of_row(row) for client_id, row in numbers.items()}


def build_expectations(
    models: PersonalModels, examples: np.ndarray, references: Mapping[str, Arrays]
) -> list[Expectation]:
    """Returns requests to every signature, each with examples for many clients, and the right answers.

    `examples` is float32 `[n, *input_shape]`; `references` has weights by client id ("" for the global model).
    Together, the requests ask for the answer to every example from the model of every client in `references`.
    """
    model = models.model
    with tf.device("/CPU:0"):
        # Exports are loaded on the CPU; accelerators may round matrix products by more than the tolerance.
        answers = {client_id: _answers(model, weights, examples) for client_id, weights in references.items()}
    asked, size = list(itertools.product(range(len(examples)), references)), _batch_size(models)
    first, *others = (asked[start : start + size] for start in range(0, len(asked), size))
    expected = []
    for batch in (first, *others):
        x = np.stack([examples[number] for number, _ in batch])
        right = np.stack([answers[client_id][number] for number, client_id in batch])
        client_ids = [client_id for _, client_id in batch]
        # All signatures call one function, so further batches need not go through each signature.
        for signature_name in layout.PREDICT_SIGNATURES if batch is first else layout.PREDICT_SIGNATURES[:1]:
            inputs = {"client_id": np.array(client_ids, object), "x": x}
            expected.append(Expectation(signature_name, inputs, _predicted(models, client_ids, right)))
        if batch is first:
            expected.append(_expected_of_examples(models, client_ids, x, right))
    if takes_images(model.input_shape):
        expected.append(_expected_of_images(models, references, size))
    return expected


def expectations_of_version(export_dir: Path, models: PersonalModels) -> dict[str, Expectation]:
    """Returns requests to a version and the version's answers to them, by client id; the global model has the id "".

    The requests are for the global model and for some of the clients. A new version that is made from this version must
    give the same answers. `models` must give the same answers, too, which this function checks. If answers differ, the
    program or the configuration has changed since the export, and a new version would change all clients' answers.

    Raises:
      ServingError: the version does not load, or answers differently from `models`, which were read from the version.
    """
    examples = examples_for(models.model)[: _batch_size(models)]
    places = np.linspace(0, len(models.rows) - 1, MAX_REFERENCES).astype(int) if len(models.rows) else []
    rows = {"": GLOBAL_ROW, **{models.client_ids[place]: int(models.rows[place]) for place in places}}
    (signature_name, *_) = layout.PREDICT_SIGNATURES
    expected = {}
    with contextlib.closing(load_servable(export_dir)) as servable, tf.device("/CPU:0"):
        for client_id, row in rows.items():
            client_ids = [client_id] * len(examples)
            inputs = {"client_id": np.array(client_ids, object), "x": examples}
            answers = servable.predict(signature_name, inputs)
            of_model = _answers(models.model, models.weights_of_row(row), examples)
            check_answers(str(export_dir), answers, _predicted(models, client_ids, of_model))
            expected[client_id] = Expectation(signature_name, inputs, answers)
    return expected


def _batch_size(models: PersonalModels) -> int:
    return max(1, min(_MAX_BATCH, _MAX_BATCH_BYTES // max(1, weight_bytes_per_example(models))))


def _answers(model: Model, weights: Arrays, x: np.ndarray) -> np.ndarray:
    tensors = {name: tf.constant(value) for name, value in weights.items()}
    return model.answers(model.predict(tensors, tf.constant(x))).numpy()


def _predicted(models: PersonalModels, client_ids: list[str], right: np.ndarray) -> dict[str, np.ndarray]:
    name, _ = answers_of(models.model)
    outputs = {name: right, "personalized": np.array([client_id != "" for client_id in client_ids])}
    # If two classes are as likely, rounding decides which of them is the answer.
    if models.class_names is not None and _margin(right) > 2 * TOLERANCE:
        outputs[CLASS] = np.array([models.class_names[place].encode() for place in right.argmax(axis=-1)], object)
    return outputs


def _margin(probabilities: np.ndarray) -> float:
    """Returns the smallest difference between the largest and the second largest probability of an example."""
    ordered = np.sort(probabilities, axis=-1)
    return float((ordered[:, -1] - ordered[:, -2]).min()) if ordered.shape[-1] > 1 else 1.0


def _expected_of_examples(
    models: PersonalModels, client_ids: list[str], x: np.ndarray, right: np.ndarray
) -> Expectation:
    model = models.model
    serialised = [example(client_id, one).SerializeToString() for client_id, one in zip(client_ids, x, strict=True)]
    if model.num_classes:
        classes = np.array([[label.encode() for label in models.labels]] * len(x), object)
        outputs = {tf.saved_model.CLASSIFY_OUTPUT_CLASSES: classes, tf.saved_model.CLASSIFY_OUTPUT_SCORES: right}
    else:
        outputs = {tf.saved_model.REGRESS_OUTPUTS: right}
    inputs = {tf.saved_model.CLASSIFY_INPUTS: np.array(serialised, object)}
    return Expectation(examples_signature(model), inputs, outputs)


def _expected_of_images(models: PersonalModels, references: Mapping[str, Arrays], size: int) -> Expectation:
    """Returns a request with one image of no client, for some clients."""
    model = models.model
    pixels = np.random.default_rng(1).integers(0, 256, model.input_shape, np.uint8)
    content = tf.io.encode_png(pixels).numpy()
    client_ids = list(references)[: min(size, NUM_EXAMPLES)]
    x = pixels[np.newaxis].astype(np.float32) / 255
    with tf.device("/CPU:0"):
        right = np.concatenate([_answers(model, references[client_id], x) for client_id in client_ids])
    inputs = {"client_id": np.array(client_ids, object), "image_bytes": np.array([content] * len(client_ids), object)}
    return Expectation(layout.IMAGES_SIGNATURE, inputs, _predicted(models, client_ids, right))
