"""The benchmark of synthetic tables: marginals, distances and noise by hand, and tables from files as they come."""

import math

import numpy as np
import pytest
import scipy.io

from benchmarks.synthetic import tables
from benchmarks.synthetic.marginals import (
    Binned,
    bin_cells,
    distances,
    marginals,
    noise_alone,
    release_directly,
)
from tff_pdp.privacy.synthetic.table import TableSchema
from tff_pdp.settings import read_settings

SCHEMA = read_settings(
    TableSchema,
    {
        "columns": {
            "age": {"kind": "numeric", "low": 0, "high": 100},
            "ill": {"kind": "categorical", "categories": ["no", "yes"]},
        }
    },
    "example",
)
# Columns of two and three categories.
FOUR_ROWS = Binned(np.array([[0, 0], [0, 2], [1, 2], [1, 2]]), (2, 3))


def test_cells_have_bins_and_categories_in_the_schemas_order():
    rows = [("no", "0"), ("yes", "9.9"), ("no", "10"), ("yes", "99"), ("yes", "100")]
    found = bin_cells(("ill", "age"), rows, SCHEMA)
    assert found.sizes == (10, 2)
    assert found.places.tolist() == [[0, 0], [0, 1], [1, 0], [9, 1], [9, 1]]


def test_marginals_count_each_column_and_each_pair():
    found = {key: counts.tolist() for key, counts in marginals(FOUR_ROWS).items()}
    assert found == {(0,): [2, 2], (1,): [1, 0, 3], (0, 1): [1, 0, 1, 0, 0, 2]}


def test_distances_are_half_the_sum_of_differences_of_shares():
    # Twice as many rows; the second column is the other way round in two of eight.
    other = Binned(np.array([[0, 0], [0, 2], [0, 0], [0, 2], [1, 2], [1, 2], [1, 0], [1, 0]]), (2, 3))
    found = distances(marginals(other), marginals(FOUR_ROWS))
    # Columns: 0, and (4/8 - 1/4 + 3/4 - 4/8) / 2 = 1/4. The pair: (1, 2) and (1, 0) differ by 1/4 each.
    assert found == pytest.approx((0.125, 0.25, 0.25))
    assert distances(marginals(FOUR_ROWS), marginals(FOUR_ROWS)) == (0, 0, 0)
    apart = Binned(np.array([[1, 1]]), (2, 3))
    assert distances(marginals(apart), marginals(FOUR_ROWS)) == pytest.approx((0.75, 1, 1))
    # Nothing known: equal shares.
    nothing = {key: np.zeros(len(counts)) for key, counts in marginals(FOUR_ROWS).items()}
    assert distances(nothing, marginals(FOUR_ROWS)).one_way == pytest.approx((0 + (1 / 12 + 1 / 3 + 5 / 12) / 2) / 2)


def test_a_direct_release_has_the_noise_of_all_marginals_and_no_negative_counts():
    exact = marginals(FOUR_ROWS)
    # Three marginals: a record changes three counts by one, which has the norm sqrt(3).
    up = release_directly(exact, 2.0, np.ones)
    assert up[1,] == pytest.approx(np.array([1, 0, 3]) + 2 * math.sqrt(3))
    down = release_directly(exact, 1.0, lambda size: -np.ones(size))
    assert down[1,] == pytest.approx([0, 0, 3 - math.sqrt(3)])


def test_the_noise_alone_is_what_simulated_noise_has():
    exact, generator = marginals(FOUR_ROWS), np.random.default_rng(0)
    stddev = 0.1 * math.sqrt(3)
    simulated = {
        key: np.abs(generator.normal(0, stddev, (20_000, len(counts))) / 4).sum(axis=1).mean() / 2
        for key, counts in exact.items()
    }
    found = noise_alone(exact, 0.1)
    assert found.one_way == pytest.approx((simulated[0,] + simulated[1,]) / 2, rel=0.02)
    assert found.two_way == pytest.approx(simulated[0, 1], rel=0.02) and found.worst == found.two_way


def test_school_and_heart_files_become_tables_that_their_schemas_allow(tmp_path):
    first, second = np.zeros((60, 28), np.uint8), np.zeros((50, 28), np.uint8)
    for x in (first, second):
        x[:, [0, 5, 8, 12, 21, 26]], x[:, 3], x[:, 4] = 1, 30, 20
    # A pupil without a band.
    second[0, 8] = 0
    silos, scores = np.empty((1, 2), object), np.empty((1, 2), object)
    silos[0, :], scores[0, :] = [first, second], [np.full((60, 1), 7, np.uint8), np.full((50, 1), 70, np.uint8)]
    (tmp_path / "school").mkdir()
    scipy.io.savemat(tmp_path / "school" / "school.mat", {"X": silos, "Y": scores})
    header, rows = tables.school_rows(tmp_path / "school" / "school.mat")
    assert dict(zip(header, rows[0], strict=True)) == {
        "free_meals": "30",
        "top_band": "20",
        "year": "0",
        "sex": "0",
        "band": "1",
        "ethnicity": "2",
        "school_sex": "0",
        "denomination": "2",
        "score": "7",
    }
    assert rows[60][header.index("band")] == "unknown" and rows[60][-1] == "70"
    (tmp_path / "heart").mkdir()
    patient = "63.0,1.0,4.0,145.0,233.0,1.0,2.0,150.0,0.0,-2.3,?,?,?,"
    unknown = patient.replace("145.0", "?")
    for name in tables.HEART_FILES:
        (tmp_path / "heart" / f"processed.{name}.data").write_text(f"{patient}0\n{unknown}1\n" + f"{patient}3\n" * 20)
    header, rows = tables.heart_rows(tmp_path / "heart")
    assert len(rows) == 4 * 21
    assert rows[0] == ["63", "1", "4", "145", "233", "1", "2", "150", "0", "-2.3", "no"] and rows[1][-1] == "yes"
    # Every record is for training or for testing.
    for subject in tables.read_subjects(tmp_path):
        sizes = len(subject.train.cells), len(subject.test.cells)
        assert sum(sizes) == (110 if subject.name.startswith("school") else 84) and min(sizes) > 5


@pytest.fixture(scope="module")
def subject():
    """A table of 1,500 rows whose score grows with the age, in two bands."""
    generator = np.random.default_rng(0)
    columns = {
        "age": {"kind": "numeric", "low": 0, "high": 100, "bins": 10},
        "band": {"kind": "categorical", "categories": ["a", "b"]},
        "score": {"kind": "numeric", "low": 0, "high": 50},
    }
    schema = read_settings(TableSchema, {"columns": columns}, "example")
    ages = generator.uniform(10, 90, 1500)
    scores = np.clip(ages / 2 + generator.normal(0, 2, 1500), 0, 50)
    cells = [[f"{age:.3f}", "ab"[int(age > 50)], f"{score:.3f}"] for age, score in zip(ages, scores, strict=True)]
    return tables._subject("example", schema, "score", 800, list(columns), cells)


def test_models_are_tested_on_records_that_nothing_else_uses(subject):
    train, test = ({tuple(row) for row in part.cells} for part in (subject.train, subject.test))
    assert not train & test and len(train) + len(test) == 1500
    # The noise of the scores is 2, and their standard deviation with it is sqrt(133 + 4).
    assert tables.test_error(subject, subject.train.header, subject.train.cells) == pytest.approx(2, abs=0.25)
    assert tables.constant_error(subject) == pytest.approx(math.sqrt(137), abs=1)
    chosen = subject._replace(target="band")
    assert tables.test_error(chosen, subject.train.header, subject.train.cells) < 0.1
    only = [row for row in subject.train.cells if row[1] == "a"]
    assert tables.test_error(chosen, subject.train.header, only) == pytest.approx(0.5, abs=0.1)
    assert tables.constant_error(chosen) == pytest.approx(0.5, abs=0.1)


def test_a_measurement_is_the_same_again_and_more_budget_is_better(subject):
    found = tables.measure(subject, 10.0, 2)
    assert found == tables.measure(subject, 10.0, 2)
    assert found["training_records"] + found["test_records"] == 1500 and found["synthetic_rows"] == 800
    shares = found["distances"]
    assert shares["independent"]["one_way"] == 0 < shares["sample"]["one_way"] < shares["synthetic"]["two_way"]
    assert shares["synthetic"]["two_way"] < shares["independent"]["two_way"]
    little = tables.measure(subject, 0.1, 2)
    assert little["noise_multiplier"] > 20 * found["noise_multiplier"]
    assert little["distances"]["noise"]["two_way"] > 20 * shares["noise"]["two_way"]
    assert little["distances"]["synthetic"]["two_way"] > shares["synthetic"]["two_way"]
    errors = found["test_error"]
    assert errors["records"] < errors["synthetic"] == pytest.approx(np.mean(errors["synthetic_by_seed"]))
    assert errors["synthetic"] < errors["constant"]
    first, _, row, *rest = tables.table_text([found]).splitlines()
    assert not rest and row.startswith("| example | 10 | ") and row.count("|") == first.count("|")
