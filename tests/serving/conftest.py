"""One small exported model and one running server for every test that only reads them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from serving.export.exporter import export_models
from serving.export.versions import hold
from serving.models import PersonalModels
from serving.server.embedded import EmbeddedServer
from serving.server.options import Limits
from serving.tf_serving import ServedModel
from serving.verify.fresh_process import FreshProcess
from tests.rounding import ELEMENTARY, gamma
from tff_pdp.models.base import Model
from tff_pdp.models.dense import build_mlp

MODEL_NAME = "toy"
MAX_BYTES = 1 << 16
MAX_ELEMENTS = 1 << 10


@dataclasses.dataclass(frozen=True)
class Exporter:
    """A model with weights, and how to export them; every export is verified by the same process."""

    model: Model
    global_weights: dict[str, np.ndarray]
    personal_weights: dict[str, dict[str, np.ndarray]]
    x: np.ndarray
    process: FreshProcess

    def models(self, personal_weights: Mapping[str, Mapping[str, np.ndarray]] | None = None) -> PersonalModels:
        """The models of these clients; what the first of them owns, each of them owns."""
        clients = self.personal_weights if personal_weights is None else personal_weights
        owned = set(next(iter(clients.values()), {}))
        return PersonalModels(
            model=self.model,
            client_ids=list(clients),
            rows=np.arange(1, len(clients) + 1, dtype=np.int32) if owned else np.zeros(len(clients), np.int32),
            shared={name: array for name, array in self.global_weights.items() if name not in owned},
            stacked={
                name: np.stack([self.global_weights[name], *(own[name] for own in clients.values())]) for name in owned
            },
        )

    def export(self, base_path: Path, personal_weights=None, **changes) -> Path:
        arguments = {
            "models": self.models(personal_weights),
            "model_name": MODEL_NAME,
            "privacy_report": {"claim": "none"},
            "model_card": {"purpose": "test"},
            "process": self.process,
        }
        with hold(base_path.absolute()) as held:
            return export_models(held, **{**arguments, **changes})

    def rounding(self, x: np.ndarray | None = None) -> float:
        """How far two probabilities of one client's model may lie apart in float32, of examples as large as these.

        A score sums over each layer's inputs, of which those of images are levels divided by 255; what it loses moves
        a probability by at most a half of it, on each side. After it come an exponential, a sum over classes and a
        quotient.
        """
        rows = [{**self.global_weights, **own} for own in ({}, *self.personal_weights.values())]
        terms = {name: np.max([np.abs(row[name]) for row in rows], axis=0) for name in self.global_weights}
        scores = self.model.predict(terms, tf.constant(np.abs(self.x if x is None else x)))
        sums = sum(math.prod(value.shape[:-1]) + 1 for value in terms.values() if value.ndim > 1)
        after = 2 * gamma(2 * ELEMENTARY + self.model.num_classes + 1)
        return gamma(sums + 3) * float(np.max(scores)) + after

    def expected(self, client_ids: list[str], x: np.ndarray) -> np.ndarray:
        """Probabilities of the model in this process, example by example."""
        rows = []
        for client_id, example in zip(client_ids, x, strict=True):
            weights = {**self.global_weights, **self.personal_weights.get(client_id, {})}
            rows.append(tf.nn.softmax(self.model.predict(weights, tf.constant(example[np.newaxis])))[0].numpy())
        return np.array(rows)


@pytest.fixture(scope="session")
def exporter(fresh_process) -> Exporter:
    model = build_mlp((3, 2), num_classes=4, hidden_units=(5,))
    return Exporter(
        model=model,
        global_weights=model.init(0),
        personal_weights={"alice": model.init(1), "bob": model.init(2), "é ü": model.init(3)},
        x=np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32),
        process=fresh_process,
    )


@pytest.fixture(scope="session")
def export_dir(exporter, tmp_path_factory) -> Path:
    return exporter.export(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def server(export_dir):
    with EmbeddedServer(
        [ServedModel(MODEL_NAME, export_dir.parent)], poll_seconds=60, limits=Limits(MAX_BYTES, MAX_ELEMENTS)
    ) as running:
        yield running
