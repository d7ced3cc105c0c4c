import json
import math
from typing import Any

import dp_accounting
import msgspec
import numpy as np
import pytest
from scipy import stats

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.accounting.accountants import epsilon_bounds, exact_gaussian_epsilon
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import GENERATORS
from tff_pdp.privacy.synthetic.datalens import DataLens, PaperBudget, datalens, queries_within_budget
from tff_pdp.privacy.synthetic.release import plan_release, statement
from tff_pdp.settings import read_settings

INF, NAN = math.inf, math.nan


def draws_of(key=b"a key of synthetic data"):
    return ExactDraws(key)


def settings_of(**changes):
    return DataLens(
        **{
            "examples": 30,
            "num_classes": 2,
            "teachers": 20,
            "votes": 4,
            "steps": 3,
            "fakes_per_step": 4,
            "student_units": (8,),
            "teacher_units": 4,
            "latents": 3,
            **changes,
        }
    )


def two_classes(n):
    """Class 0 is dark, class 1 bright, in turn."""
    y = np.arange(n) % 2
    return np.random.default_rng(0).uniform(0, 0.3, size=(n, 2, 3)) + 0.7 * y[:, None, None], y


def test_the_event_is_as_many_gaussians_as_votes_are_asked_for():
    z = 19.5
    votes = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(z), 12)
    assert settings_of(labels="uniform").event(z) == votes
    counts = dp_accounting.GaussianDpEvent(z / (0.2 * math.sqrt(12)))
    assert settings_of().event(z) == dp_accounting.ComposedDpEvent([counts, votes])
    # All of it is one Gaussian, of which counts have the share 0.2^2.
    together = exact_gaussian_epsilon(z / math.sqrt(12 * (1 + 0.2**2)), 1e-5)
    assert epsilon_bounds(settings_of().event(z), 1e-5).best == pytest.approx(together, rel=1e-6)
    assert settings_of(votes=9).sigma(z) == 6 * z


def test_votes_within_a_budget():
    assert queries_within_budget(300, 800.0, 10.0, 1e-5) == 2134
    assert queries_within_budget(200, 5000.0, 1.0, 1e-5) == 2245
    # By the exact profile of a Gaussian mechanism, written out.
    for queries, fits in ((2134, True), (2135, False)):
        mu = 2 * math.sqrt(300 * queries) / 800
        delta = stats.norm.cdf(mu / 2 - 10 / mu) - math.exp(10) * stats.norm.cdf(-mu / 2 - 10 / mu)
        assert (delta <= 1e-5) == fits
    assert queries_within_budget(300, 1.0, 0.1, 1e-5) == 0
    for changed in ((0, 800.0, 10.0, 1e-5), (300, 0.0, 10.0, 1e-5), (300, 800.0, INF, 1e-5), (300, 800.0, 10.0, 1.0)):
        with pytest.raises(ConfigError):
            queries_within_budget(*changed)


def test_noise_above_all_votes_is_refused_with_the_numbers_before_the_release():
    x, y = two_classes(60)
    draws = draws_of()
    with pytest.raises(ConfigError, match=r"standard deviation 20\.4, but 20 teachers together have at most 20 votes"):
        datalens(x, y, settings_of(), 5.1, draws)
    assert draws.words(3).tolist() == draws_of().words(3).tolist()
    with pytest.raises(ConfigError, match="Nothing was released; force: true"):
        plan_release(settings_of(), 1.0, 1e-5)
    settings_of().check_noise(5.0)
    forced = settings_of(force=True, labels="uniform")
    assert len(plan_release(forced, 1.0, 1e-5).make(x, y).x) == 30


def test_the_student_follows_the_votes_of_teachers():
    x, y = two_classes(800)
    settings = settings_of(
        steps=40, votes=6, student_rate=0.05, teacher_rate=0.02, gamma=0.1, examples=400, student_units=(16,)
    )
    made = datalens(x, y, settings, 0.02, draws_of())
    dark, bright = (made.x[made.y == label].mean() for label in (0, 1))
    assert bright - dark > 0.3
    assert made.x.shape == (400, 2, 3) and made.x.dtype == np.float64 and made.y.dtype == np.int64
    # With noise above all votes, hardly any vote counts, and the student learns nothing.
    lost = datalens(x, y, msgspec.structs.replace(settings, force=True), 50.0, draws_of())
    dark, bright = (lost.x[lost.y == label].mean() for label in (0, 1))
    assert abs(bright - dark) < 0.3


def test_classes_without_records_get_no_examples():
    x, _ = two_classes(400)
    settings = settings_of(num_classes=5)
    for number in range(3):
        made = datalens(x, np.where(np.arange(400) % 2, 1, 3), settings, 0.5, draws_of(b"sixteen bytes %3d" % number))
        assert set(made.y.tolist()) == {1, 3}
    assert set(datalens(x, np.zeros(400, int), settings, 0.5, draws_of()).y.tolist()) == {0}
    everything = datalens(x, np.zeros(400, int), settings_of(num_classes=5, labels="uniform"), 0.5, draws_of())
    assert np.bincount(everything.y).tolist() == [6] * 5


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_records_are_refused_after_the_release(number):
    x, y = two_classes(4)
    with pytest.raises(DataError, match="The release has been made: its cost counts"):
        datalens(x[:number], y[:number], settings_of(), 4.0, draws_of())
    made = datalens(x[:number], y[:number], settings_of(labels="uniform"), 4.0, draws_of())
    assert made.x.shape == (30, 2, 3) and np.isfinite(made.x).all()


def test_examples_stay_in_range_whatever_the_records():
    x, y = two_classes(400)
    for value in (NAN, INF, -INF, 1e300, -1e300):
        x[::7] = value
        made = datalens(x, y, settings_of(low=-1.0, high=1.0), 0.5, draws_of())
        assert np.isfinite(made.x).all() and np.abs(made.x).max() <= 1


def test_equal_keys_give_equal_bits_and_others_do_not():
    x, y = two_classes(200)
    first, again = (datalens(x, y, settings_of(), 0.5, draws_of()) for _ in range(2))
    other = datalens(x, y, settings_of(), 0.5, draws_of(b"quite another key"))
    assert (first.x == again.x).all() and (first.y == again.y).all() and not (first.x == other.x).all()
    order = np.random.default_rng(1).permutation(200)
    moved = datalens(x[order], y[order], settings_of(), 0.5, draws_of())
    assert (first.x == moved.x).all()


def test_the_size_is_public():
    for n in (150, 900):
        assert len(datalens(*two_classes(n), settings_of(examples=33), 0.5, draws_of()).x) == 33


def test_ids_divide_records():
    x, y = two_classes(200)
    ids = [f"person {number}" for number in range(200)]
    named = datalens(x, y, settings_of(), 0.5, draws_of(), ids=ids)
    assert (named.x != datalens(x, y, settings_of(), 0.5, draws_of()).x).any()
    with pytest.raises(ConfigError, match="200 examples, but 199 ids"):
        datalens(x, y, settings_of(), 0.5, draws_of(), ids=ids[1:])


def test_shapes_and_labels_that_do_not_fit_are_refused():
    x, y = two_classes(40)
    for settings, labels, message in [
        (settings_of(votes=7), y, "votes is 7, but examples have 6 features"),
        (settings_of(), y[1:], "40 examples, but labels of shape"),
        (settings_of(paper_even_partition=True, teachers=41), y, "40 records are too few for 41 teachers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            datalens(x, labels, settings, 0.5, draws_of())
    with pytest.raises(DataError, match="a label is not one of the classes 0 to 1"):
        datalens(x, y + 1, settings_of(), 0.5, draws_of())
    for noise in (0.0, NAN, 1e5):
        with pytest.raises(ConfigError, match="noise_multiplier"):
            datalens(x, y, settings_of(), noise, draws_of())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"paper_even_partition": True}, "one record may be given to several teachers"),
        ({"paper_data_dependent": PaperBudget(epsilon=5.0, delta=1e-5)}, "an account that depends on the records"),
    ],
)
def test_paper_settings_run_and_claim_nothing(changes, reason):
    settings = settings_of(**changes)
    planned = plan_release(settings, 50.0, 1e-5)
    made = planned.make(*two_classes(400))
    assert made.x.shape == (30, 2, 3)
    stated = json.loads(json.dumps(statement(planned, ["the schema"], "one row")))
    assert stated["claim"] == "none" and reason in stated["claim_reason"] and stated["epsilon"] is None
    assert stated["event"] == {"name": "NonPrivateDpEvent"}
    assert planned.epsilon == INF and planned.ledger("ward").epsilon("ward").best == INF
    sound = statement(plan_release(settings_of(), 50.0, 1e-5), [], "one row")
    assert sound["claim"] == "formal-conditional" and sound["epsilon"] <= 50


def test_the_papers_account_ends_training():
    x, y = two_classes(400)
    budgets = [PaperBudget(epsilon=1e-3, delta=1e-5), PaperBudget(epsilon=1e6, delta=1e-5), None]
    ended, whole, without = (
        datalens(x, y, settings_of(paper_data_dependent=budget), 0.5, draws_of()) for budget in budgets
    )
    assert (whole.x == without.x).all() and not (ended.x == whole.x).all()


def test_settings_are_found_by_kind():
    kind: Any = GENERATORS.find("datalens")
    content = {"kind": "datalens", "examples": 5, "teachers": 7, "paper_data_dependent": {"epsilon": 1, "delta": 1e-5}}
    found = read_settings(kind, content, "a.yaml", "synthetic")
    assert found.teachers == 7 and found.paper_data_dependent == PaperBudget(epsilon=1.0, delta=1e-5)
    with pytest.raises(ConfigError, match=r"synthetic\.threshold must be"):
        read_settings(kind, {**content, "threshold": 2}, "a.yaml", "synthetic")
