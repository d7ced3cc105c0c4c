"""Real runs in two phases, of a few made-up images: synthetic images first, then records."""

import contextlib

import numpy as np
import pytest

from tests.beam_pipelines.sources.raw_images import write_idx
from tests.reproduce.reproduce_support import build_reproduction
from tests.reproduce.settings_support import setting_changed
from tff_pdp.experiment.synthetic_data import DATA_FILE
from tff_pdp.reproduce.inputs import digest_of
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.report import build_report, report_text
from tff_pdp.reproduce.run import JobRunner
from tff_pdp.reproduce.sweep import ResultStore, images_file

EPSILON, OTHER = 16.0, 8.0
SMALL = {
    "data.input_shape": [4, 4, 1],
    "data.shrink": 1,
    "data.training_images": None,
    "data.partition": {"kind": "uniform", "num_clients": 2},
    "model": {"kind": "linear"},
    "privacy.synthetic.generator": {"kind": "dp_gaussian", "examples": 64, "radius": 2.0},
    "privacy.synthetic.rounds": 3,
    "privacy.batch_size": 32,
    "training.rounds": 4,
}
METHODS = ("fed_avg", "pppfl", "local_slow_short")


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory):
    """Two silos of 400 images of two classes: one row of an image is bright, and tells which."""
    folder = tmp_path_factory.mktemp("synthetic")
    rng = np.random.default_rng(0)
    (folder / "mnist").mkdir()
    for name, count in (("train", 800), ("t10k", 200)):
        labels = rng.integers(0, 2, count)
        images = rng.integers(0, 60, (count, 4, 4))
        for image, label in zip(images, labels, strict=True):
            image[1 + label] += 190
        write_idx(folder / "mnist" / f"{name}-images-idx3-ubyte.gz", images.astype(np.uint8))
        write_idx(folder / "mnist" / f"{name}-labels-idx1-ubyte.gz", labels.astype(np.uint8))
    with setting_changed("pppfl_mnist", SMALL):
        yield build_reproduction(
            folder,
            setting_name="pppfl_mnist",
            scale_name="small",
            methods=METHODS,
            epsilons=(EPSILON, OTHER),
            seeds=1,
            data_input=folder / "mnist",
            data_digest=digest_of(folder / "mnist"),
        )


@pytest.fixture(scope="module")
def outcomes(reproduction):
    with contextlib.closing(JobRunner(reproduction)) as runner:
        return [runner(job) for job in reproduction.jobs()]


def test_shared_models_know_synthetic_images_and_personal_models_records_too(outcomes):
    rows = {(one.job.method, one.job.budget): one.row for one in outcomes}
    assert not any(one.infeasible for one in outcomes)
    for method in ("fed_avg", "pppfl"):
        row = rows[method, EPSILON]
        # Half of the test images are of either class.
        assert row["shared"] > 0.9 and row["value"] > 0.9
        assert 0.98 * EPSILON < row["with_secret_key"]["epsilon"] <= EPSILON
    assert "shared" not in rows["local_slow_short", EPSILON]


def test_methods_of_one_budget_have_the_same_synthetic_images(reproduction, outcomes):
    folders = {name: reproduction.config(Job("default", name, EPSILON, 0)).output for name in METHODS}
    assert folders["fed_avg"] == folders["pppfl"] != folders["local_slow_short"]
    places = sorted(reproduction.output.glob(f"data/*/{DATA_FILE}"))
    assert len(places) == 2, "one for each budget"
    with (
        np.load(f"{folders['fed_avg']}/{DATA_FILE}") as made,
        np.load(images_file(reproduction.output, "default", EPSILON)) as kept,
    ):
        assert made["x_0"].shape == (64, 4, 4, 1)
        assert kept["value_range"].tolist() == [0, 1]
        for name in ("x_0", "y_0", "x_1", "y_1"):
            np.testing.assert_array_equal(kept[name], made[name])


def test_the_report_has_both_models_differences_and_pictures(reproduction, outcomes):
    from tff_pdp.reproduce.figures import write_image_figures

    store = ResultStore(reproduction)
    for outcome in outcomes:
        store.add(outcome)
    report = build_report(reproduction, store, {})
    files = write_image_figures(report, reproduction.output)["default"]
    assert sorted(path.suffix for path in files) == [".png", ".png", ".svg", ".svg"]
    text = report_text(report, {"default": [path.name for path in files if path.suffix == ".png"]})
    assert "shared model | personal models" in text
    assert "PPPFL minus FedAvg" in text
    assert "![Synthetic images of seed 0, a row for each silo](synthetic_default_16.png)" in text
