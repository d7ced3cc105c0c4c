"""Exporting personal models: one SavedModel for all clients, verified before any server can see it."""

import contextlib
import dataclasses
import datetime
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from serving.export import expectations
from serving.export import model_checks as layouts
from serving.export.model_checks import check_models, check_references
from serving.export.served_module import ServedModule, write_vocabulary
from serving.export.signatures import build_signatures, finish_signatures, signature_names
from serving.export.versions import HeldBasePath, hold, staged_version
from serving.models import Arrays, PersonalModels
from serving.saved_model import layout, warmup
from serving.saved_model import layout as manifest
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.files import naming


def export_models(
    base_path: str | Path | HeldBasePath,
    models: PersonalModels,
    *,
    model_name: str,
    privacy_report: Mapping[str, Any],
    model_card: Mapping[str, Any],
    example_inputs: np.ndarray | None = None,
    references: Mapping[str, Arrays] | None = None,
    further_expectations: Sequence[Expectation] = (),
    version: int | None = None,
    process: FreshProcess | None = None,
) -> Path:
    """Writes, verifies and publishes one SavedModel for all clients.

    Its signatures `serving_default` and `predict` take `client_id` string `[batch]` and `x` float32
    `[batch, *input_shape]`, and return `probabilities` float32 `[batch, num_classes]` (of a regression: `values`
    float32 `[batch]`), and `personalized` bool `[batch]`. A batch may mix clients; an unknown or empty id is answered
    by the global model. `predict_images`, of models of images, takes `image_bytes` string `[batch]` in place of `x`:
    see `serving.export.signatures`. `classify` returns `classes` string and `scores` float32 `[batch, num_classes]`
    (of a regression: `regress` returns `outputs` float32 `[batch]`) for `inputs` string `[batch]`: serialised
    `tf.Example` messages of `x` and perhaps `client_id`. TensorFlow Serving demands these names.

    The export holds client ids as they are given and weights fitted to single clients: both are personal data. Pass
    keyed hashes as ids unless the ids may be published.

    Args:
      base_path: directory of all versions of the model; the new version is a child of it. Where the caller holds it
        already, what `versions.hold` gave.
      models: what is served.
      model_name: the name under which the model will be served.
      privacy_report: JSON values, stored as `assets.extra/privacy_report.json`.
      model_card: JSON values, stored as `assets.extra/model_card.json`.
      example_inputs: float32 `[n, *input_shape]`, n at least 1, not stored: what the export must answer like
        `model.predict`. By default drawn uniformly from `[0, 1)`.
      references: all weights of some clients, by id ("" for the global model), worked out independently of `models`:
        what the export must answer like. By default those of `models`, for 32 clients.
      further_expectations: what else it must answer, such as what the version before did.
      version: the version number, above every number used before; by default the next one.
      process: what verifies the export; by default one that is started for this call, which takes seconds.

    Returns:
      The published directory, `base_path/<version>`.

    Raises:
      ServingError: if an argument does not fit the model, the export fails its verification, or somebody else exports
        to the base path. Nothing is published, and nothing is left that looks like a version.
    """
    layout.check_model_name(model_name)
    with contextlib.ExitStack() as stack:
        # First of all: it imports TensorFlow while this process checks and writes.
        process = stack.enter_context(FreshProcess()) if process is None else process
        check_models(models)
        if references is not None:
            check_references(models, references)
        expected = expectations.build_expectations(
            models,
            expectations.public_examples(models.model)
            if example_inputs is None
            else expectations.check_examples(models.model, example_inputs),
            expectations.default_references(models) if references is None else references,
        )
        documents = Documents(model_name, privacy_report, model_card)
        held = (
            base_path if isinstance(base_path, HeldBasePath) else stack.enter_context(hold(Path(base_path).absolute()))
        )
        return publish(held, models, documents, [*expected, *further_expectations], process, version=version)


@dataclasses.dataclass(frozen=True)
class Documents:
    """What is said of an export: its name, and JSON values about its privacy and its purpose."""

    model_name: str
    privacy_report: Mapping[str, Any]
    model_card: Mapping[str, Any]


def publish(
    held: HeldBasePath,
    models: PersonalModels,
    documents: Documents,
    expected: list[Expectation],
    process: FreshProcess,
    *,
    version: int | None = None,
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Writes models that passed `check_models`, verifies and publishes them; returns the version's directory.

    Args:
      held: directory of all versions, absolute.
      models: what is served.
      documents: what is said of it.
      expected: what it must answer.
      process: what verifies it.
      version: as in `export_models`.
      details: JSON values for the manifest, beside its own.

    Raises:
      ServingError: as `export_models`.
    """
    with staged_version(held, version) as (number, staging), _naming_disk_of(staging):
        signatures = _write_saved_model(staging, models)
        (staging / layout.EXTRA_DIRECTORY).mkdir()
        manifest.write_json(staging / layout.MODEL_CARD_FILE, dict(documents.model_card))
        manifest.write_json(staging / layout.PRIVACY_REPORT_FILE, dict(documents.privacy_report))
        warmup.write_requests(
            staging,
            documents.model_name,
            signature_names(models.model),
            models.client_ids,
            models.model.input_shape,
        )
        manifest.write_manifest(
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
                "size": dataclasses.asdict(layouts.estimate(models)),
                "signatures": signatures,
                **(details or {}),
            },
        )
        process.verify(staging, expected)
    return held.path / str(number)


def _write_saved_model(staging: Path, models: PersonalModels) -> dict[str, Any]:
    """Returns what the signatures take and give."""
    # TensorFlow names the table after this path, so it must be unique and say nothing about this machine.
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
    """Makes errors of a full disk name what could not be written, TensorFlow's among them."""
    try:
        with naming(staging):
            yield
    except tf.errors.ResourceExhaustedError as error:
        # Memory that is used up is of the same kind.
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging)) from None
