"""Exporting a personalised model: one SavedModel for all clients, checked before any server can see it."""

import datetime
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from serving import layout, loader, manifest, versions, warmup
from serving.signatures import GLOBAL_ID, Arrays, PersonalizedModule, answers_of, build_signatures
from tff_pdp.errors import ServingError
from tff_pdp.models.base import Model

VOCABULARY_FILE = "client_ids.txt"
# Float32 rounds logits in the tens so that probabilities differ by some 1e-6.
TOLERANCE = 1e-5
MAX_VALIDATED_CLIENTS = 32


def export_personalized(
    base_path: str | Path,
    model: Model,
    global_weights: Arrays,
    personal_weights: Mapping[str, Arrays],
    *,
    example_inputs: np.ndarray,
    model_name: str,
    privacy_report: dict[str, Any],
    model_card: dict[str, Any],
    version: int | None = None,
) -> Path:
    """Writes, validates and publishes one multi-tenant SavedModel.

    Its signatures `serving_default` and `predict` take `client_id` string `[batch]` and `x` float32
    `[batch, *input_shape]`, and return `probabilities` float32 `[batch, num_classes]` (of a regression: `values`
    float32 `[batch]`), and `personalized` bool `[batch]`. A batch may mix clients; an unknown or empty id is answered
    by the global model.

    The export holds client ids in clear and weights fitted to single clients: both are personal data. Pass keyed
    hashes as ids unless the ids may be published. `example_inputs` are used for validation and are not stored.

    Args:
      base_path: directory of all versions of the model; the new version is a child of it.
      model: the model that the weights belong to.
      global_weights: every weight of the model, float32, by name.
      personal_weights: for each client id the weights it owns, float32; all clients own the same names, which may be
        all weights or only some, such as the head. May be empty.
      example_inputs: float32 `[n, *input_shape]`, n at least 1: what the export must answer like `model.predict`.
      model_name: the name under which the model will be served.
      privacy_report: JSON values, stored as `assets.extra/privacy_report.json`.
      model_card: JSON values, stored as `assets.extra/model_card.json`.
      version: the version number, above every number used before; by default the next one.

    Returns:
      The published directory, `base_path/<version>`.

    Raises:
      ServingError: if an argument does not fit the model, or the export fails its validation. Nothing is published,
        and nothing is left that looks like a version.
    """
    layout.check_model_name(model_name)
    _check_weights(model, global_weights, personal_weights)
    _check_client_ids(personal_weights)
    example_inputs = _check_example_inputs(model, example_inputs)
    base_path = Path(base_path).absolute()
    with versions.staged_version(base_path, version) as (number, staging):
        _write_saved_model(staging, model, global_weights, personal_weights)
        extra = staging / layout.EXTRA_DIRECTORY
        extra.mkdir()
        manifest.write_json(staging / layout.MODEL_CARD_FILE, model_card)
        manifest.write_json(staging / layout.PRIVACY_REPORT_FILE, privacy_report)
        warmup.write_requests(staging, model_name, list(personal_weights), model.input_shape)
        manifest.write_manifest(staging, _details(model, model_name, number, len(personal_weights)))
        _validate(staging, model, global_weights, personal_weights, example_inputs)
    return base_path / str(number)


def _check_weights(model: Model, global_weights: Arrays, personal_weights: Mapping[str, Arrays]) -> None:
    shapes = {name: array.shape for name, array in model.init(0).items()}
    if set(global_weights) != set(shapes):
        raise ServingError(
            f"Global weights are {sorted(global_weights)}, but the model {model.name!r} has {sorted(shapes)}."
        )
    owned = set(next(iter(personal_weights.values()), {}))
    for client, weights in {"the global model": global_weights, **personal_weights}.items():
        if weights is not global_weights and (set(weights) != owned or not owned <= set(shapes)):
            raise ServingError(
                f"Weights of client {client!r} are {sorted(weights)}; every client must own the same weights of the "
                f"model, here {sorted(owned & set(shapes))}."
            )
        for name, array in weights.items():
            if array.shape != shapes[name] or array.dtype != np.float32:
                raise ServingError(
                    f"Weight {name!r} of {client!r} is {array.dtype} {array.shape}; "
                    f"the model needs float32 {shapes[name]}."
                )
            if not np.isfinite(array).all():
                raise ServingError(f"Weight {name!r} of {client!r} has a value that is not finite.")


def _check_client_ids(personal_weights: Mapping[str, Arrays]) -> None:
    for client_id in personal_weights:
        # The vocabulary has one id a line, and TensorFlow drops carriage returns when it reads it.
        if client_id in ("", GLOBAL_ID) or "\n" in client_id or "\r" in client_id:
            raise ServingError(
                f"Client id {client_id!r} cannot be exported: it is empty, {GLOBAL_ID!r}, or holds a line break."
            )


def _check_example_inputs(model: Model, example_inputs: np.ndarray) -> np.ndarray:
    example_inputs = np.asarray(example_inputs, np.float32)
    if example_inputs.shape[1:] != model.input_shape or not len(example_inputs):
        needed = ", ".join(["n", *map(str, model.input_shape)])
        raise ServingError(
            f"Example inputs have shape {example_inputs.shape}; the model needs [{needed}] with n at least 1."
        )
    return example_inputs


def _write_saved_model(
    staging: Path, model: Model, global_weights: Arrays, personal_weights: Mapping[str, Arrays]
) -> None:
    # TensorFlow names the table after this path, so it must be unique and say nothing about this machine.
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = Path(scratch) / VOCABULARY_FILE
        vocabulary.write_text("".join(f"{name}\n" for name in (GLOBAL_ID, *personal_weights)), encoding="utf-8")
        module = PersonalizedModule(model, global_weights, personal_weights, vocabulary)
        tf.saved_model.save(module, str(staging), signatures=build_signatures(module, model.input_shape))


def _details(model: Model, model_name: str, version: int, num_clients: int) -> dict[str, Any]:
    """What the manifest says beside the hashes."""
    name, shape = answers_of(model)
    signature = {
        "inputs": {
            "client_id": {"dtype": "string", "shape": [None]},
            "x": {"dtype": "float32", "shape": [None, *model.input_shape]},
        },
        "outputs": {
            name: {"dtype": "float32", "shape": shape},
            "personalized": {"dtype": "bool", "shape": [None]},
        },
    }
    return {
        "model_name": model_name,
        "version": version,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tensorflow_version": tf.__version__,
        "num_clients": num_clients,
        "signatures": {name: signature for name in layout.SIGNATURE_NAMES},
    }


def _validate(
    staging: Path,
    model: Model,
    global_weights: Arrays,
    personal_weights: Mapping[str, Arrays],
    example_inputs: np.ndarray,
) -> None:
    """Loads the staged files as a server would, and compares their answers with the model in this process."""
    servable = loader.load_servable(staging)
    name, _ = answers_of(model)
    clients = ["", *list(personal_weights)[:MAX_VALIDATED_CLIENTS]]
    for client_id in clients:
        weights = {**global_weights, **personal_weights.get(client_id, {})}
        expected = _answers(model, weights, example_inputs)
        inputs = {"client_id": np.array([client_id] * len(example_inputs), object), "x": example_inputs}
        for signature_name in layout.SIGNATURE_NAMES:
            answer = servable.predict(signature_name, inputs)
            # Absolute for a probability, relative for a large value.
            difference = np.max(np.abs(answer[name] - expected) / np.maximum(np.abs(expected), 1.0))
            if not difference <= TOLERANCE or not (answer["personalized"] == bool(client_id)).all():
                raise ServingError(
                    f"The export answers client {client_id!r} differently from the model: {name} differ by "
                    f"{difference:.2g}, more than {TOLERANCE:g}. Nothing was published."
                )


def _answers(model: Model, weights: Arrays, x: np.ndarray) -> np.ndarray:
    # On the CPU, where the export is loaded: accelerators may round matrix products further off than the tolerance.
    with tf.device("/CPU:0"):
        tensors = {name: tf.constant(value) for name, value in weights.items()}
        return model.answers(model.predict(tensors, tf.constant(x))).numpy()
