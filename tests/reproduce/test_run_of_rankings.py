"""Rows of models that are judged by average precision."""

import contextlib
import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from tests.reproduce.reproduce_support import build_reproduction
from tests.reproduce.settings_support import setting_changed
from tests.rounding import gamma
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.models.metrics import AVERAGE_PRECISION
from tff_pdp.reproduce.inputs import digest_of
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.run import JobRunner
from tff_pdp.reproduce.setting import Variant

SMALL = {
    "training.rounds": 2,
    "training.weighting": "uniform",
    "data.input_shape": [2],
    "model": {"kind": "logistic_regression", "metric": "average_precision"},
    "algorithms.local_only": {"learning_rate": 0.5, "local_steps": 1},
}


@pytest.fixture
def reproduction(tmp_path):
    """Three silos, of which the last has no positive example."""
    rng = np.random.default_rng(0)
    silos = []
    for place, size in enumerate((60, 40, 20)):
        x = rng.normal(size=(size, 2))
        y = np.where((x[:, 0] > 0.5 * rng.normal(size=size)) & (place < 2), 1, -1)
        silos.append(SiloArrays(f"silo {place}", x + place, y))
    path = tmp_path / "silos.npz"
    write_silo_arrays(path, silos)
    variants = (Variant(name="default", title="as configured"),)
    with setting_changed("vehicle", SMALL, metric=AVERAGE_PRECISION.name, variants=variants):
        yield build_reproduction(
            tmp_path, setting_name="vehicle", scale_name="small", data_input=path, data_digest=digest_of(path)
        )


def test_a_row_has_the_mean_over_silos_and_the_figure_of_all_examples(reproduction):
    """Without noise, no silo has more training examples than a batch: two steps of gradient descent, by hand."""
    job = Job("default", "local_only", math.inf, 0)
    with contextlib.closing(JobRunner(reproduction)) as runner:
        row = runner(job).row
    clients = ClientDataset.open(reproduction.config(job).clients_folder)
    scores, labels, own = [], [], []
    for client_id in clients.client_ids:
        train, test = clients.load(client_id, "train"), clients.load(client_id, "test")
        x, weights = np.append(train.x, np.ones([len(train.y), 1]), axis=1), np.zeros(3)
        for _ in range(2):
            weights -= 0.5 * (1 / (1 + np.exp(-x @ weights)) - train.y) @ x / len(x)
        scores.append(test.x @ weights[:2] + weights[2])
        labels.append(test.y)
        own.append(average_precision_score(test.y, scores[-1]) if test.y.any() else math.nan)
    sizes = [len(y) for y in labels]
    assert sizes == [15, 10, 5]
    assert row["metric"] == "average_precision"
    # Only the order of the scores counts; figures are rounded to float32 once.
    assert row["value"] == pytest.approx(np.average(own[:2], weights=sizes[:2]), rel=gamma(2))
    assert row["mean_over_clients"] == pytest.approx(np.mean(own[:2]), rel=gamma(2))
    assert row["worst_decile"] == pytest.approx(min(own[:2]), rel=gamma(2))
    pooled = average_precision_score(np.concatenate(labels), np.concatenate(scores))
    assert row["pooled_average_precision"] == pytest.approx(pooled, rel=gamma(2))
    assert pooled != pytest.approx(row["value"], rel=1e-3)
