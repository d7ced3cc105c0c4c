"""Two methods seed by seed, the shared model beside personal ones, and published figures that are not comparable."""

import pytest
from msgspec.structs import replace

from tests.reproduce.reproduce_support import build_reproduction, fake_row
from tff_pdp.models.metrics import ACCURACY
from tff_pdp.reproduce import setting as settings
from tff_pdp.reproduce.comparisons import Comparison, differences_over_seeds
from tff_pdp.reproduce.figures import style_of
from tff_pdp.reproduce.means import means_over_seeds, measured_in
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.reproduce.report import build_report, report_text
from tff_pdp.reproduce.setting import NAMES, Band, NotComparable, read_setting
from tff_pdp.reproduce.sweep import Outcome, ResultStore

PAIR = Comparison(method="pppfl", minus="fed_avg")
# The 97.5 % quantile of Student's t with two degrees of freedom, from a table.
T_OF_THREE = 4.302653


def rows(method, *values, epsilon=2.0, seeds=None):
    numbered = enumerate(values) if seeds is None else zip(seeds, values, strict=True)
    return [{"method": method, "epsilon": epsilon, "seed": seed, "value": value} for seed, value in numbered]


def test_differences_are_of_the_same_seed_whatever_the_order():
    results = rows("fed_avg", 0.6, 0.8, 0.7, seeds=(2, 0, 1)) + rows("pppfl", 0.82, 0.74, 0.66)
    (found,) = differences_over_seeds(results, [PAIR])
    # 0.02, 0.04 and 0.06, of standard deviation 0.02.
    assert (found.budget, found.seeds, found.mean) == (2.0, 3, pytest.approx(0.04))
    assert found.margin == pytest.approx(T_OF_THREE * 0.02 / 3**0.5, rel=1e-6)
    assert not found.is_finding


def test_a_difference_is_a_finding_if_its_interval_excludes_zero():
    for shift, is_finding in ((0.049, False), (0.051, True), (-0.051, True)):
        results = rows("fed_avg", 0.6, 0.6, 0.6) + rows("pppfl", *(0.6 + shift + one for one in (-0.02, 0.0, 0.02)))
        (found,) = differences_over_seeds(results, [PAIR])
        # The margin is 0.0497.
        assert found.is_finding == is_finding


def test_seeds_and_budgets_that_one_method_lacks_are_left_out():
    results = rows("pppfl", 0.5, 0.9) + rows("fed_avg", 0.4) + rows("pppfl", 0.7, epsilon=10.0)
    (found,) = differences_over_seeds(results, [PAIR, Comparison(method="scaffold", minus="fed_avg")])
    assert (found.budget, found.mean, found.margin, found.seeds) == (2.0, pytest.approx(0.1), None, 1)
    assert not found.is_finding


@pytest.fixture
def school(monkeypatch):
    """School with all that a setting of methods on synthetic data has."""
    read, setting = settings.read_setting, settings.read_setting("school")
    changed = replace(
        setting,
        averages="clients",
        shows_shared_model=True,
        comparisons=(Comparison(method="mr_mtl", minus="fed_avg"), Comparison(method="fed_avg", minus="local_only")),
        not_comparable=NotComparable(heading="elsewhere", values={"mr_mtl": 0.5}, reasons=("another data set",)),
        bands=(Band(variant="default", method="fed_avg", at_most=0.03, epsilon=6.0, source="a sketch"),),
    )
    monkeypatch.setattr(settings, "read_setting", lambda name: changed if name == "school" else read(name))
    return changed


@pytest.fixture
def report(school, tmp_path):
    reproduction = build_reproduction(tmp_path, seeds=3)
    store = ResultStore(reproduction)
    for job in reproduction.jobs():
        shared = {} if job.method == "local_only" else {"shared": 0.25 + 0.01 * job.seed}
        store.add(Outcome(job, fake_row(job, **shared)))
    return build_report(reproduction, store, {})


def cells_of(text, *words):
    (line,) = [line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_have_shared_models_and_figures_that_are_not_comparable(report):
    text = report_text(report)
    assert cells_of(text, "method")[1:4] == ["method", "shared model", "personal models"]
    # Shared: 0.25, 0.26, 0.27. Personal: 0.026 + 0.001 / 6 + 0.0001 * seed.
    mr_mtl = cells_of(text, "| MR-MTL ", "±")
    assert mr_mtl[1:4] == ["MR-MTL", "0.26000 ± 0.01000", "0.02627 ± 0.00010"]
    assert (cells_of(text, "seeds", "method")[-1], mr_mtl[-1]) == ("elsewhere", "0.50000")
    local = cells_of(text, "| Local ", "±")
    assert (local[2], local[-1]) == ("–", "–")
    assert "elsewhere:\n\n* another data set\n" in text
    assert "mean over silos, each with the same weight" in " ".join(text.split())


def test_differences_are_told_with_intervals_in_text_and_as_plain_data(report):
    # Every seed has the same difference.
    assert cells_of(report_text(report), "MR-MTL minus FedAvg")[1:3] == ["ε = 6", "-0.002"]
    first, second = report.as_dict()["variants"]["default"]["differences"]
    assert (first["method"], first["minus"], first["epsilon"], first["seeds"]) == ("mr_mtl", "fed_avg", 6.0, 3)
    assert first["interval"] == [pytest.approx(-0.002), pytest.approx(-0.002)]
    assert second["mean"] == pytest.approx(-0.002) and second["is_finding"]


def test_bands_may_be_at_an_epsilon(school, report):
    (band,) = report.verdicts_on_bands(report.variants[0])
    assert band["holds"] and band["text"] == "FedAvg is at most 0.03 at ε = 6 (a sketch)"
    points = replace(school.bands[0], method="pppfl", minus="fed_avg", at_least=0.005, at_most=0.02)
    assert points.text(ACCURACY) == "PPPFL minus FedAvg is at least 0.5 points and at most 2 points at ε = 6 (a sketch)"
    results = [
        {"with_secret_key": {"epsilon": 6.0}, "worst_decile": 0.0, **row}
        for name, value in {"pppfl": 0.9, "fed_avg": 0.6}.items()
        for row in rows(name, value, epsilon=6.0)
    ]
    assert measured_in(points, means_over_seeds(results)) == pytest.approx(0.3)


@pytest.mark.parametrize("more", [{}, {"budgets": "mixed", "epsilon": 1.0}])
def test_a_band_is_under_one_budget(more):
    with pytest.raises(ValueError, match="a band needs either budgets or epsilon"):
        Band(variant="v", method="pppfl", at_least=0.0, source="s", **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comparisons": (Comparison(method="pppfl", minus="fed_avg"),)}, "comparisons: unknown name 'pppfl'"),
        (
            {"not_comparable": NotComparable(heading="h", values={"gossip": 1.0}, reasons=())},
            "not_comparable: unknown name 'gossip'",
        ),
    ],
)
def test_unknown_names_are_refused(school, change, message):
    with pytest.raises(ValueError, match=message):
        replace(school, **change)


@pytest.mark.parametrize("name", NAMES)
def test_methods_of_one_setting_have_different_styles(name):
    styles = [style_of(method) for method in read_setting(name).methods]
    looks = {(style["color"], style["linestyle"], style["marker"]) for style in styles}
    assert len(looks) == len(styles)


def test_titles_tell_methods_apart():
    titles = [method.title for method in METHODS.values()]
    assert len(set(titles)) == len(titles)
