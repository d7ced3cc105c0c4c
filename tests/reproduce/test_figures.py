import itertools

import numpy as np
import pytest
from matplotlib.image import imread

from tests.reproduce.reproduce_support import build_reproduction, fake_row
from tff_pdp.reproduce.figures import (
    lambda_figure,
    privacy_overhead_figure,
    privacy_utility_figure,
    write_figures,
    write_image_figures,
)
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.report import build_report, report_text
from tff_pdp.reproduce.sweep import Outcome, ResultStore, keep_images


@pytest.fixture
def report_of(tmp_path):
    def build(**changes):
        reproduction = build_reproduction(tmp_path, **changes)
        store = ResultStore(reproduction)
        for job in reproduction.jobs():
            store.add(Outcome(job, fake_row(job)))
        return build_report(reproduction, store, {})

    return build


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_privacy_against_utility_has_a_line_for_each_method_and_stars_for_the_paper(report_of):
    report = report_of(methods=("local_only", "mr_mtl"), epsilons=(1.0, 6.0))
    figure = privacy_utility_figure(report.variants[0], report)
    (axes,) = figure.get_axes()
    lines = lines_of(axes)
    assert set(lines) == {"Local", "MR-MTL", "published"}
    xs, ys = lines["MR-MTL"].get_data()
    assert list(xs) == [1.0, 6.0]
    assert list(ys) == pytest.approx([0.02705, 0.026 + 0.00005 + 0.001 / 6])
    stars = [line.get_data() for line in axes.get_lines() if line.get_marker() == "*"]
    assert sorted((xs[0], ys[0]) for xs, ys in stars) == [(6.0, 0.02394), (6.0, 0.02628)]


def test_what_is_the_same_at_every_epsilon_is_a_line_across(report_of):
    report = report_of(
        setting_name="mnist_writers", methods=("local_only", "centaur"), epsilons=(2.0, 8.0, float("inf"))
    )
    (axes,) = privacy_utility_figure(report.variants[0], report).get_axes()
    lines = lines_of(axes)
    assert list(lines["CENTAUR"].get_xdata()) == [2.0, 8.0]
    assert len(set(lines["Local"].get_ydata())) == 1
    assert axes.get_xlabel() == "ε of every user"


def test_the_overhead_is_drawn_only_where_there_is_some(report_of):
    without = report_of(methods=("local_only", "mr_mtl"))
    assert privacy_overhead_figure(without.variants[0], without) is None
    report = report_of(methods=("local_only", "mr_mtl", "ditto", "ifca", "mocha"))
    (axes,) = privacy_overhead_figure(report.variants[0], report).get_axes()
    assert {"Ditto", "IFCA, every round", "Local"} < set(lines_of(axes))
    assert "Mocha" not in lines_of(axes)


def test_lambda_has_a_panel_for_each_epsilon_and_lines_across(report_of):
    report = report_of(
        methods=("local_only", "fed_avg", "mr_mtl", "mr_mtl_auto", "ditto"),
        epsilons=(1.0, 6.0),
        lambdas=(10.0, 0.1, 1.0),
    )
    figure = lambda_figure(report.variants[0], report)
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["ε = 1", "ε = 6"]
    lines = lines_of(panels[1])
    assert set(lines) == {"MR-MTL", "Ditto", "Local", "FedAvg", "MR-MTL, automatic λ"}
    assert list(lines["MR-MTL"].get_xdata()) == [0.1, 1.0, 10.0]
    assert len(set(lines["Local"].get_ydata())) == 1
    without = report_of()
    assert lambda_figure(without.variants[0], without) is None


def test_files_are_written_for_each_variant_and_repeat(report_of, tmp_path):
    report = report_of(
        methods=("local_only", "mr_mtl", "ditto"), lambdas=(0.1, 1.0), variant_names=("default", "silo_scaling")
    )
    written = write_figures(report, tmp_path / "figures")
    names = itertools.product(("lambda", "privacy_overhead", "privacy_utility"), ("", "_silo_scaling"), ("png", "svg"))
    assert sorted(path.name for path in written) == sorted(f"{stem}{variant}.{kind}" for stem, variant, kind in names)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {path.name for path in written}
    picture = imread(tmp_path / "figures" / "lambda.png")
    assert picture.shape[0] > 400
    assert picture.std() > 0.01
    first = {path: path.read_bytes() for path in written}
    assert {path: path.read_bytes() for path in write_figures(report, tmp_path / "figures")} == first


def test_kept_synthetic_images_are_drawn_for_each_budget(report_of, tmp_path):
    report = report_of(methods=("local_only",), epsilons=(1.0, 6.0))
    silos = {f"silo_{place}": (np.full((3, 2, 2, 1), place / 2, np.float32), np.array([3, 1, 3])) for place in (0, 1)}
    assert write_image_figures(report, tmp_path) == {}
    keep_images(tmp_path, Job("default", "local_only", 6.0, 1), silos, (0.0, 1.0))
    assert write_image_figures(report, tmp_path) == {}
    keep_images(tmp_path, Job("default", "local_only", 6.0, 0), silos, (0.0, 1.0))
    written = write_image_figures(report, tmp_path)
    names = [path.name for path in written["default"]]
    assert names == ["synthetic_default_6.svg", "synthetic_default_6.png"]
    text = written["default"][0].read_text()
    assert "silo_0" in text and "silo_1" in text
    again = text, written["default"][1].read_bytes()
    keep_images(tmp_path, Job("default", "fed_avg", 6.0, 0), silos, (0.0, 1.0))
    write_image_figures(report, tmp_path)
    assert (written["default"][0].read_text(), written["default"][1].read_bytes()) == again
    place = "figures/synthetic_default_6.png"
    lines = report_text(report, {"default": [place]}).splitlines()
    assert f"![Synthetic images of seed 0, a row for each silo]({place})" in lines
