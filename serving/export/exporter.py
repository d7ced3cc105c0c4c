"""Exports personal models as one SavedModel for all clients, and verifies it before any server can load it."""

import contextlib
import dataclasses
import datetime
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from serving.export import expectations
from serving.export.model_checks import check_models, check_references, estimate
from serving.export.served_module import ServedModule, write_vocabulary
from serving.export.signatures import build_signatures, finish_signatures, signature_names
from serving.export.versions import HeldBasePath, staged_version
from serving.models import Arrays, PersonalModels
from serving.saved_model import layout, warmup
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.files import naming


def export_models(
    held: HeldBasePath,
    models: PersonalModels,
    *,
    model_name: str,
    privacy_report: Mapping[str, Any],
    model_card: Mapping[str, Any],
    process: FreshProcess,
    references: Mapping[str, Arrays] | None = None,
    further_expectations: Sequence[Expectation] = (),
) -> Path:
    """Writes, verifies and publishes the next version: one SavedModel for all clients.

    | signature | inputs | outputs |
    |---|---|---|
    | `serving_default`, `predict` | `client_id`, `x` | `probabilities` (or `values`), `personalized`, `class` |
    | `predict_images`, for images | `client_id`, `image_bytes` string `[n]` | the same as `predict` |
    | `classify` | `inputs` string `[n]`: `tf.Example`s with `client_id`, `x` | `classes`, `scores` `[n, num_classes]` |
    | `regress` | the same as `classify` | `outputs` float32 `[n]` |

    `client_id` is string `[n]`, `x` float32 `[n, *input_shape]`, `classes` string; `probabilities` and `scores` are
    float32 `[n, num_classes]`, `values` (of a regression) float32 `[n]`, `personalized` bool `[n]`. The global model
    answers unknown ids. If classes have names, `class`, string `[n]`, is the name of the class with the largest
    probability, and `classes` has names; otherwise there is no `class`, and `classes` has the numbers of the classes.

    The export has clients' ids and personal weights: both are personal data. Use keyed hashes as ids unless the ids may
    be published. One request may have examples of several clients.

    Args:
      held: directory of all versions of the model, locked by `versions.hold`.
      models: models to serve.
      model_name: model's name in requests.
      privacy_report: JSON values to be stored as `assets.extra/privacy_report.json`.
      model_card: JSON values to be stored as `assets.extra/model_card.json`.
      process: process that verifies the export.
      references: all weights of some clients, by id ("" for the global model), computed independently of `models`. The
        export must answer random examples as `model.predict` does with these weights. Default: weights of the global
        model and of the first 32 clients, computed from `models`.
      further_expectations: further requests with their right answers, such as the answers of the previous version.

    Returns:
      The published directory, `<held>/<version>`.

    Raises:
      ServingError: an argument does not fit the model, or the export fails its verification. Then nothing is published,
        and no folder is left that a server could load as a version.
    """
    layout.check_model_name(model_name)
    check_models(models)
    if references is None:
        references = expectations.default_references(models)
    check_references(models, references)
    expected = expectations.build_expectations(models, expectations.examples_for(models.model), references)
    documents = Documents(model_name, privacy_report, model_card)
    return publish(held, models, documents, [*expected, *further_expectations], process)


@dataclasses.dataclass(frozen=True)
class Documents:
    """A model's name in requests, and its privacy report and model card as JSON values, to be stored in an export."""

    model_name: str
    privacy_report: Mapping[str, Any]
    model_card: Mapping[str, Any]


def publish(
    held: HeldBasePath,
    models: PersonalModels,
    documents: Documents,
    expected: list[Expectation],
    process: FreshProcess,
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Writes, verifies and publishes a version of models that passed `check_models`, and returns its directory.

    `expected` has requests and their right answers, and `details` has further JSON values for the manifest. Other
    arguments and errors are those of `export_models`.
    """
    with staged_version(held) as (number, staging), _naming_disk_of(staging):
        signatures = _write_saved_model(staging, models)
        (staging / layout.EXTRA_DIRECTORY).mkdir()
        layout.write_json(staging / layout.MODEL_CARD_FILE, dict(documents.model_card))
        layout.write_json(staging / layout.PRIVACY_REPORT_FILE, dict(documents.privacy_report))
        names, input_shape = signature_names(models.model), models.model.input_shape
        warmup.write_requests(staging, documents.model_name, names, models.client_ids, input_shape)
        layout.write_manifest(
            staging,
            {
                "model_name": documents.model_name,
                "version": number,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "tensorflow_version": tf.__version__,
                "layout": models.layout,
                "num_clients": len(models.client_ids),
                "num_rows": models.num_rows,
                "weights": {"shared": sorted(models.shared), "stacked": sorted(models.stacked)},
                "size": dataclasses.asdict(estimate(models)),
                "signatures": signatures,
                **({"class_names": list(models.class_names)} if models.class_names is not None else {}),
                **(details or {}),
            },
        )
        process.verify(staging, expected)
    return held / str(number)


def _write_saved_model(staging: Path, models: PersonalModels) -> dict[str, Any]:
    """Writes the SavedModel, and returns the descriptions of its signatures."""
    # TensorFlow names the table after this path, so the path must be unique and say nothing about this machine.
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = Path(scratch) / Path(layout.VOCABULARY_FILE).name
        with naming(vocabulary):
            write_vocabulary(vocabulary, models)
        # Variables on an accelerator would be copied there and back.
        with tf.device("/CPU:0"):
            module = ServedModule(models, vocabulary)
        tf.saved_model.save(module, str(staging), signatures=build_signatures(module, models.model))
    return finish_signatures(staging)


@contextlib.contextmanager
def _naming_disk_of(staging: Path) -> Iterator[None]:
    """Makes errors of a full disk, also those of TensorFlow, name the folder."""
    try:
        with naming(staging):
            yield
    except tf.errors.ResourceExhaustedError as error:
        # TensorFlow raises the same error when memory is used up.
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging)) from None
