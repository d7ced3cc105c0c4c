"""Settings of PPPFL on MNIST and Fashion-MNIST."""

import itertools
from pathlib import Path

import pytest

from tests.reproduce.reproduce_support import build_reproduction
from tff_pdp.algorithms.hyper_parameters import read_epochs
from tff_pdp.privacy.accounting.budgets import OneForAll
from tff_pdp.reproduce.inputs import INPUTS, find_input
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.setting import read_setting

NAMES = ("pppfl_mnist", "pppfl_fashion")
GRID = ("local_slow_short", "local_slow_long", "local_fast_short", "local_fast_long")


def reproduction_of(name, folder):
    scale = read_setting(name).scales["small"]
    methods = read_setting(name).methods
    return build_reproduction(
        folder, setting_name=name, scale_name="small", methods=methods, epsilons=scale.epsilons, seeds=scale.seeds
    )


@pytest.mark.parametrize("name", NAMES)
def test_methods_on_records_have_the_whole_budget_and_no_synthetic_data(tmp_path, name):
    reproduction = reproduction_of(name, tmp_path)
    for method in (*GRID, "finetune_records"):
        config = reproduction.config(Job("default", method, 2.0, 1))
        assert config.privacy.budgets == OneForAll(epsilon=2.0, delta=1e-5)
        assert config.privacy.synthetic is None
        ((algorithm, settings),) = config.algorithms.items()
        # Nothing leaves a silo that trains alone: its epochs are in one round.
        assert config.training.rounds == (25 if algorithm == "finetune" else 1)
        assert not {"adaptation_steps", "adaptation_learning_rate"} & set(settings)
        assert config.data.seed == 1
        assert (config.data.training_images, config.data.input_shape) == (8000, (14, 14, 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_of_local_training_is_whole_and_every_point_is_compared(tmp_path, name):
    reproduction = reproduction_of(name, tmp_path)
    points = [reproduction.config(Job("default", method, 2.0, 0)).algorithms[method] for method in GRID]
    rates_and_steps = [(point["learning_rate"], point["local_steps"]) for point in points]
    assert rates_and_steps == list(itertools.product((0.5, 1.0), ("10 epochs", "25 epochs")))
    setting = read_setting(name)
    assert {one.minus for one in setting.comparisons if one.method == "pppfl"} > set(GRID)
    # The point that was chosen in advance comes first, and stands beside the published figure.
    assert (setting.comparisons[0].method, setting.comparisons[0].minus) == ("pppfl", "local_slow_long")
    assert "local_slow_long" in setting.not_comparable.values


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_run_at_two_budgets_with_five_seeds(tmp_path, name):
    jobs = reproduction_of(name, tmp_path).jobs()
    assert len(jobs) == 15 * 2 * 5
    assert {(job.budget, job.seed) for job in jobs} == set(itertools.product((2.0, 10.0), range(5)))


@pytest.mark.parametrize("name", NAMES)
def test_adaptation_has_rate_and_epochs_of_the_local_training_that_is_compared(tmp_path, name):
    reproduction = reproduction_of(name, tmp_path)
    (local,) = reproduction.config(Job("default", "local_slow_long", 2.0, 0)).algorithms.values()
    for method in ("pppfl", "fed_avg", "fed_prox", "fed_nova", "scaffold", "fed_meta", "fed_meta_second"):
        config = reproduction.config(Job("default", method, 2.0, 0))
        synthetic, (settings,) = config.privacy.synthetic, config.algorithms.values()
        assert (synthetic.share, synthetic.adaptation, synthetic.generator.examples) == (0.5, "dp_sgd", 2000)
        rounds = config.training.rounds - synthetic.rounds
        assert settings["adaptation_learning_rate"] == local["learning_rate"]
        assert rounds * read_epochs(settings["adaptation_steps"]) == read_epochs(local["local_steps"]) == 25
        assert config.training.weighting == ("budget_softmax" if method == "pppfl" else "uniform")
    (shorter,) = reproduction.config(Job("default", "local_slow_short", 2.0, 0)).algorithms.values()
    for method in ("pppfl_short", "fed_avg_short"):
        config = reproduction.config(Job("default", method, 2.0, 0))
        (settings,) = config.algorithms.values()
        assert rounds * read_epochs(settings["adaptation_steps"]) == read_epochs(shorter["local_steps"]) == 10
        assert config.training.weighting == ("budget_softmax" if method == "pppfl_short" else "uniform")


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_variant_adapts_without_noise(tmp_path, name):
    reproduction = reproduction_of(name, tmp_path)
    assert reproduction.config(Job("paper", "pppfl", 2.0, 0)).privacy.synthetic.adaptation == "non_private"
    assert reproduction.config(Job("paper", "local_slow_long", 2.0, 0)).privacy.synthetic is None


def test_a_folder_of_synthetic_data_is_for_one_budget_and_seed_and_for_all_methods(tmp_path):
    reproduction = reproduction_of("pppfl_mnist", tmp_path)

    def folder(method, budget, seed, variant="default"):
        return reproduction.config(Job(variant, method, budget, seed)).output

    assert folder("pppfl", 2.0, 0) == folder("fed_avg", 2.0, 0)
    others = [folder("pppfl", *job) for job in ((2.0, 0), (10.0, 0), (2.0, 1), (2.0, 0, "paper"))]
    assert len({*others, folder("local_slow_long", 2.0, 0)}) == 5
    # Without synthetic data, a folder has records alone.
    assert folder("local_slow_long", 2.0, 0) == folder("finetune_records", 10.0, 0)


def test_both_data_sets_have_the_same_methods_and_comparisons():
    mnist, fashion = map(read_setting, NAMES)
    assert (mnist.methods, mnist.comparisons) == (fashion.methods, fashion.comparisons)
    assert set(mnist.not_comparable.values) == set(fashion.not_comparable.values)
    # Table II of the paper.
    assert (mnist.not_comparable.values["pppfl"], fashion.not_comparable.values["pppfl"]) == (0.964, 0.9199)
    # Nothing was measured on Fashion-MNIST before.
    assert mnist.bands and not fashion.bands


def test_fashion_mnist_is_found_in_the_folder_of_data_first(tmp_path):
    inputs = INPUTS["fashion_mnist"]
    (tmp_path / "fashion-mnist").mkdir()
    assert find_input(inputs, str(tmp_path)) == tmp_path / "fashion-mnist"
    assert [Path("data") / path for path in inputs.paths][1] == Path("/usr/share/datasets/fashion-mnist")
