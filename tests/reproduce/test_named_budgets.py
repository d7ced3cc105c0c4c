"""Budgets that differ between silos: as a dimension of a sweep, in rows, tables, statements, bands and figures."""

import dataclasses
import json

import pytest
from msgspec.structs import replace

from tests.reproduce.reproduce_support import build_reproduction, fake_row
from tests.unrun import parse
from tff_pdp.cli import COMMANDS
from tff_pdp.errors import ConfigError
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
from tff_pdp.privacy.accounting.budgets import Cycled, Drawn
from tff_pdp.reproduce import setting as settings
from tff_pdp.reproduce.figures import budgets_figure, privacy_utility_figure, write_figures
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.means import Mean, holds, means_over_seeds, measured_in
from tff_pdp.reproduce.methods import METHODS, SweptMethod
from tff_pdp.reproduce.report import build_report, report_text
from tff_pdp.reproduce.reproduction import build_reproduction as complete
from tff_pdp.reproduce.setting import NAMES, Band, Scale, Statement, read_setting
from tff_pdp.reproduce.sweep import Outcome, ResultStore
from tff_pdp.reproduce.tables import traffic_lines
from tff_pdp.settings import read_settings

MIXTURE = {
    "kind": "drawn",
    "distribution": {
        "kind": "normal_mixture",
        "components": [{"share": 0.9, "mean": 0.5, "stddev": 0.01}, {"share": 0.1, "mean": 10, "stddev": 0.1}],
        "minimum": 0.1,
    },
    "delta": 1e-3,
}
BUDGETS = {"mixed": MIXTURE, "listed": {"kind": "cycled", "epsilons": [1, 5], "delta": 1e-3}}
BANDS = (
    Band(variant="default", method="mr_mtl", at_most=0.0263, budgets="mixed", source="a sketch"),
    Band(variant="default", method="fed_avg", minus="mr_mtl", at_least=0.003, budgets="mixed", source="a sketch"),
    Band(variant="silo_scaling", method="mr_mtl", at_least=0.0, budgets="mixed", source="a sketch"),
    Band(variant="default", method="ditto", at_least=0.0, budgets="mixed", source="a sketch"),
)
STATEMENTS = (
    Statement(better="mr_mtl", worse="fed_avg", source="a figure", budgets="mixed"),
    Statement(better="mr_mtl", worse="fed_avg", source="a figure", epsilon=6.0),
    Statement(better="local_only", worse="mr_mtl", source="a figure"),
)


@pytest.fixture
def school(monkeypatch):
    """School with two budgets that differ between silos."""
    read, setting = settings.read_setting, settings.read_setting("school")
    full = replace(setting.scales["full"], epsilons=(), budgets=("mixed", "listed"))
    changed = replace(
        setting,
        scales={**setting.scales, "full": full},
        budgets=BUDGETS,
        bands=BANDS,
        statements=STATEMENTS,
        paper_values={"mr_mtl": {"mixed": 0.025, "6": 0.02}},
        explanation=("Why this is measured.",),
        traffic_baseline="mr_mtl",
    )
    monkeypatch.setattr(settings, "read_setting", lambda name: changed if name == "school" else read(name))
    return changed


def named(output, **changes):
    return build_reproduction(output, **{"epsilons": (), "budgets": ("mixed", "listed"), **changes})


def test_jobs_are_made_for_each_of_the_budgets(school, tmp_path):
    jobs = named(tmp_path, methods=("fed_avg",)).jobs()
    assert [(job.budget, job.seed) for job in jobs] == [("mixed", 0), ("mixed", 1), ("listed", 0), ("listed", 1)]
    assert str(jobs[0]) == "fed_avg (default), budgets mixed, seed 0"
    grid = named(tmp_path, methods=("mr_mtl",), seeds=1, lambdas=(0.5,)).jobs()
    assert [(job.budget, job.prox_weight) for job in grid[2:]] == [("mixed", 0.5), ("listed", 0.5)]


def test_a_job_has_the_budgets_of_its_name_drawn_by_its_seed(school, tmp_path):
    reproduction = named(tmp_path)
    first, second = (reproduction.config(Job("default", "fed_avg", "mixed", seed)).privacy for seed in (0, 1))
    for seed, privacy in enumerate((first, second)):
        budgets = privacy.budgets
        assert isinstance(budgets, Drawn)
        assert (budgets.delta, budgets.seed, budgets.distribution.minimum) == (1e-3, seed, 0.1)
        assert [(one.share, one.mean) for one in budgets.distribution.components] == [(0.9, 0.5), (0.1, 10)]
        assert privacy.is_private
    assert first.budgets.distribution == second.budgets.distribution
    listed = reproduction.config(Job("default", "fed_avg", "listed", 1)).privacy
    assert listed.budgets == Cycled(epsilons=(1, 5), delta=1e-3)


def test_budgets_decide_the_digest_and_an_epsilon_does_not(school, tmp_path):
    reproduction = named(tmp_path)
    mixed, listed, six = (reproduction.digest(Job("default", "fed_avg", one, 0)) for one in ("mixed", "listed", 6.0))
    assert len({mixed, listed, six}) == 3
    assert reproduction.digest(Job("default", "fed_avg", 1.0, 0)) == six
    assert reproduction.digest(Job("default", "fed_avg", "mixed", 1)) == mixed


def test_a_method_may_override_the_experiment_and_its_budgets(school, tmp_path, monkeypatch):
    overrides = {"training.weighting": "num_examples", "privacy.budgets.seed": 7, "privacy.clip_norm": 0.25}
    monkeypatch.setitem(METHODS, "weighted", SweptMethod("Weighted", "fed_avg", overrides=overrides))
    monkeypatch.setitem(METHODS, "warmed", SweptMethod("Warmed", "fed_avg", warm_start_rounds=1))
    monkeypatch.setattr(settings, "read_setting", lambda name: replace(school, methods=(*school.methods, "weighted")))
    reproduction = named(tmp_path)
    plain, weighted, warmed = (
        reproduction.config(Job("default", name, "mixed", 0)) for name in ("fed_avg", "weighted", "warmed")
    )
    assert (plain.training.weighting, plain.privacy.clip_norm) == ("uniform", 1.0)
    assert (weighted.training.weighting, weighted.privacy.clip_norm) == ("num_examples", 0.25)
    assert list(weighted.algorithms) == ["fed_avg"]
    assert warmed.training.rounds == plain.training.rounds + 1 == weighted.training.rounds + 1
    digests = {reproduction.digest(Job("default", name, "mixed", 0)) for name in ("fed_avg", "weighted", "warmed")}
    assert len(digests) == 3
    # The setting's own budgets stay as they are.
    assert school.budgets == BUDGETS and "seed" not in MIXTURE


def test_the_methods_that_treat_silos_by_budgets_are_variations_of_three():
    expected = {
        "minimum": ("fed_avg", {}, {"privacy.budgets.level": "minimum"}, 0),
        "wei_avg": ("fed_avg", {}, {"training.weighting": "budget"}, 0),
        "pfa": ("pfa", {}, {}, 1),
        "pfa_plus": ("pfa", {"plus": True}, {}, 1),
        "public_only": ("public_only", {}, {}, 1),
    }
    for name, (algorithm, own, overrides, rounds) in expected.items():
        swept = METHODS[name]
        found = (swept.algorithm, dict(swept.settings), dict(swept.overrides), swept.warm_start_rounds)
        assert found == (algorithm, own, overrides, rounds)


def test_rows_have_the_name_in_place_of_an_epsilon_and_are_read_again(school, tmp_path):
    reproduction = named(tmp_path, methods=("fed_avg",), seeds=1)
    store = ResultStore(reproduction)
    for job in reproduction.jobs():
        store.add(Outcome(job, fake_row(job)))
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["budgets"] for row in rows] == ["mixed", "listed"]
    assert list(rows[0])[:5] == ["method", "budgets", "seed", "metric", "value"]
    assert not any("epsilon" in row for row in rows)
    again = ResultStore(reproduction)
    assert again.outcomes == store.outcomes
    # An epsilon is written as before.
    at_six = build_reproduction(tmp_path / "six", methods=("fed_avg",), seeds=1)
    (tmp_path / "six").mkdir()
    store = ResultStore(at_six)
    (job,) = at_six.jobs()
    store.add(Outcome(job, fake_row(job)))
    (line,) = (tmp_path / "six" / "partial.jsonl").read_text().splitlines()
    assert json.loads(line)["job"] == {
        "variant": "default",
        "method": "fed_avg",
        "epsilon": 6.0,
        "seed": 0,
        "prox_weight": None,
    }


@pytest.fixture
def report(school, tmp_path):
    """Made-up figures of three methods, with traffic."""
    traffic = {"fed_avg": (4e6, 4e6), "mr_mtl": (2e6, 4e6), "local_only": (0.0, 0.0)}
    reproduction = named(tmp_path)
    store = ResultStore(reproduction)
    for job in reproduction.jobs():
        up, down = traffic[job.method]
        store.add(Outcome(job, fake_row(job, uplink_bytes=up, downlink_bytes=down)))
    return build_report(reproduction, store, {})


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_name_budgets_and_have_published_figures_and_bands(report):
    text = report_text(report)
    lines = text.splitlines()
    assert "Why this is measured." in lines
    table = [cells_of(line) for line in lines if line.startswith("|")]
    assert table[0][:2] == ["budgets", "method"]
    # 0.026 + 0.001 / 10 + 0.0001 / 2 over two seeds; stated: 0.025.
    assert ["mixed", "MR-MTL", "0.02615 ± 0.00007", "2", "10", "0.02500", "+0.00115"] in table
    titles = ("Local", "FedAvg", "MR-MTL")
    assert [row[:2] for row in table[2:8]] == [[budget, title] for budget in ("mixed", "listed") for title in titles]
    assert "* holds: MR-MTL is better than FedAvg with budgets mixed (a figure)" in lines
    assert "* does not hold: Local is better than MR-MTL at every ε (a figure)" in lines
    assert "at ε = 6" not in text
    assert "* holds: MR-MTL is at most 0.0263 with budgets mixed (a sketch); measured: 0.02615" in lines
    assert (
        "* does not hold: FedAvg minus MR-MTL is at least 0.003 with budgets mixed (a sketch); measured: 0.002" in lines
    )
    assert "Ditto" not in text.partition("Unlike")[0]


def test_the_report_as_data_names_budgets_and_bands(report):
    (variant,) = report.as_dict()["variants"].values()
    assert {mean["budgets"] for mean in variant["means"]} == {"mixed", "listed"}
    assert not any("epsilon" in mean for mean in variant["means"])
    assert [(band["holds"], round(band["value"], 6)) for band in variant["bands"]] == [(True, 0.02615), (False, 0.002)]
    json.dumps(variant, allow_nan=False)


def test_traffic_is_compared_in_both_directions(report):
    lines = [cells_of(line) for line in report_text(report).splitlines() if line.startswith(("| mixed", "| listed"))]
    found = [row for row in lines if len(row) == 8]
    assert ["mixed", "FedAvg", "4.00", "4.00", "8.00", "-100.0 %", "0.0 %", "-33.3 %"] in found
    assert ["mixed", "MR-MTL", "2.00", "4.00", "6.00", "0.0 %", "0.0 %", "0.0 %"] in found
    assert ["listed", "Local", "0.00", "0.00", "0.00", "100.0 %", "100.0 %", "100.0 %"] in found


def mean_of(method, value, budget="mixed", **more):
    promise = {"claim": "none", "epsilon": None}
    return Mean(method, budget, None, value, None, 1, with_secret_key=promise, worst_decile=0.0, **more)


def test_traffic_without_the_baseline_or_without_counts():
    assert traffic_lines([mean_of("fed_avg", 0.5)], "pfa") == []
    lines = traffic_lines([mean_of("fed_avg", 0.5, 6.0, uplink_bytes=1e6, downlink_bytes=2e6)], "pfa")
    assert cells_of(lines[-1]) == ["ε = 6", "FedAvg", "1.00", "2.00", "3.00", "–", "–", "–"]


def test_bands_and_statements_on_accuracies():
    means = [mean_of("pfa", 0.84), mean_of("fed_avg", 0.79), mean_of("pfa", 0.2, "other")]
    band = Band(variant="v", method="pfa", minus="fed_avg", at_least=0.02, budgets="mixed", source="s")
    assert measured_in(band, means) == pytest.approx(0.05)
    assert measured_in(replace(band, budgets="other"), means) is None
    assert measured_in(replace(band, minus=None, budgets="other"), means) == 0.2
    assert band.text(ACCURACY) == "PFA minus FedAvg is at least 2 points with budgets mixed (s)"
    both = replace(band, minus=None, at_least=0.45, at_most=0.6)
    assert both.text(ACCURACY) == "PFA is at least 45 % and at most 60 % with budgets mixed (s)"
    said = Statement(better="pfa", worse="fed_avg", source="s", budgets="mixed")
    assert holds(said, means, ACCURACY) is True
    assert holds(said, means, MEAN_SQUARED_ERROR) is False
    assert holds(replace(said, budgets="other"), means, ACCURACY) is None


def test_means_keep_seeds_of_one_name_together():
    rows = [
        {"method": "pfa", "budgets": name, "value": value, "with_secret_key": {"epsilon": 1.0}, "worst_decile": 0.0}
        for name, value in (("mixed", 0.2), ("listed", 0.9), ("mixed", 0.4))
    ]
    assert [(one.budget, one.mean, one.seeds) for one in means_over_seeds(rows)] == [
        ("mixed", pytest.approx(0.3), 2),
        ("listed", 0.9, 1),
    ]


def test_named_budgets_have_a_figure_of_their_own(report, tmp_path):
    assert privacy_utility_figure(report.variants[0], report) is None
    figure = budgets_figure(report.variants[0], report)
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["budgets mixed", "budgets listed"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["Local", "FedAvg", "MR-MTL"]
    stars = [line.get_data() for line in panels[0].get_lines() if line.get_marker() == "*"]
    assert [(float(xs[0]), int(ys[0])) for xs, ys in stars] == [(0.025, 2)]
    names = {path.name for path in write_figures(report, tmp_path / "figures")}
    assert names == {"budgets.svg", "budgets.png"}


def options(*words):
    return parse(COMMANDS, ["reproduce", *words])


def test_the_command_takes_names_of_budgets(school, tmp_path):
    (tmp_path / "school").mkdir()
    (tmp_path / "school" / "school.mat").write_bytes(b"cells")
    words = ("school", "--data", str(tmp_path))
    default = complete(options(*words))
    assert (default.epsilons, default.budgets) == ((), ("mixed", "listed"))
    asked = complete(options(*words, "--budgets", "listed"))
    assert (asked.epsilons, asked.budgets) == ((), ("listed",))
    without = complete(options(*words, "--epsilons", "inf"))
    assert (without.epsilons, without.budgets) == ((float("inf"),), ())
    with pytest.raises(ConfigError, match="--budgets 'mixd' is not one of school's budgets: mixed, listed"):
        complete(options(*words, "--budgets", "mixd"))
    six = complete(options(*words, "--epsilons", "6", "--budgets", "mixed"))
    assert six.all_budgets == (6.0, "mixed")


def test_a_setting_without_epsilons_takes_none_but_infinity(school, tmp_path, monkeypatch):
    changed = replace(school, scales={"full": school.scales["full"]}, default_scale="full")
    monkeypatch.setattr(settings, "read_setting", lambda name: changed)
    reproduction = named(tmp_path, epsilons=(float("inf"),), budgets=())
    with pytest.raises(ConfigError, match="--epsilons 6: school has --budgets instead: mixed, listed"):
        dataclasses.replace(reproduction, epsilons=(6.0,))


def test_a_scale_may_have_some_of_the_variants(school):
    full = replace(school.scales["full"], variants=("silo_scaling", "paper"))
    assert [one.name for one in school.chosen_variants((), full, is_paper=False)] == ["silo_scaling"]
    assert [one.name for one in school.chosen_variants((), full, is_paper=True)] == ["paper"]
    with pytest.raises(ConfigError, match="--variants 'default' is not a variant of school, which has: silo_scaling"):
        school.chosen_variants(("default",), full, is_paper=False)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (Scale, {"seeds": 1}, "a scale needs epsilons or budgets"),
        (
            Statement,
            {"better": "pfa", "worse": "fed_avg", "source": "s", "epsilon": 1, "budgets": "b"},
            "a statement has either epsilon or budgets",
        ),
        (Band, {"variant": "v", "method": "pfa", "budgets": "b", "source": "s"}, "a band needs at_least or at_most"),
        (
            Band,
            {"variant": "v", "method": "pfa", "budgets": "b", "source": "s", "at_least": 0.6, "at_most": 0.5},
            "at_least may not exceed at_most",
        ),
    ],
)
def test_wrong_forms_are_refused(kind, content, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(kind, content, "a file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bands": (replace(BANDS[0], method="gossip"),)}, "bands: unknown name 'gossip'"),
        ({"bands": (replace(BANDS[0], variant="none"),)}, "variants: unknown name 'none'"),
        ({"bands": (replace(BANDS[0], budgets="mixd"),)}, "budgets: unknown name 'mixd'; did you mean mixed"),
        ({"traffic_baseline": "pfa"}, "traffic_baseline: unknown name 'pfa'"),
    ],
)
def test_unknown_names_in_a_setting_are_refused(school, change, message):
    with pytest.raises(ValueError, match=message):
        replace(school, **change)


def test_settings_without_named_budgets_have_none_of_their_parts():
    for name in NAMES:
        setting = read_setting(name)
        for scale in setting.scales.values():
            assert bool(scale.budgets) == bool(setting.budgets) != bool(scale.epsilons)
