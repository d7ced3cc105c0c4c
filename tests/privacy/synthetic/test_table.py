import itertools
import math

import numpy as np
import pytest

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import SyntheticExamples
from tff_pdp.privacy.synthetic.gaussian import DpGaussian
from tff_pdp.privacy.synthetic.release import plan_release
from tff_pdp.privacy.synthetic.table import (
    Categorical,
    Numeric,
    TableSchema,
    csv_text,
    read_table,
    row_digests,
    rows_of,
)
from tff_pdp.settings import parse_yaml, read_settings

SCHEMA = """
columns:
  age: {kind: numeric, low: 0, high: 120, whole: true}
  smoker: {kind: categorical, categories: [never, former, current]}
  dose: {kind: numeric, low: -0.5, high: 1.5}
  ward: {kind: categorical, categories: [1, 2]}
label: ward
"""
ROWS = "age,smoker,dose,ward\n60,never,-0.5,2\n0,current,1.5,1\n120,former,0.25,1\n"


def schema_of(text=SCHEMA):
    return read_settings(TableSchema, parse_yaml(text, "ward.yaml"), "ward.yaml")


def table_of(tmp_path, text=ROWS, schema=SCHEMA):
    path = tmp_path / "ward.csv"
    path.write_text(text)
    return read_table(path, schema_of(schema))


def test_columns_become_features(tmp_path):
    table = table_of(tmp_path)
    assert table.y.tolist() == [1, 0, 0] and table.x.shape == (3, 4)
    assert table.x[:, 0].tolist() == [0, -0.5, 0.5] and table.x[:, 3].tolist() == [-0.5, 0.5, -0.125]
    one_hot = table.x[:, 1:3]
    # Centred one-hot vectors of three categories: squared norm 2/3, inner product -1/3.
    assert one_hot @ one_hot.T == pytest.approx(np.eye(3) - 1 / 3)
    # Two numbers of 1/4 and a category of 2/3; and no row is longer.
    radius = schema_of().radius
    assert radius == pytest.approx(math.sqrt(0.5 + 2 / 3))
    assert np.linalg.norm(table.x, axis=1).max() <= radius


def test_records_come_back_as_they_were(tmp_path):
    schema, table = schema_of(), table_of(tmp_path)
    back = rows_of(SyntheticExamples(table.x, table.y), table.header, schema)
    assert back[0] == ["60", "never", "-0.5", "2"]
    # Two rows of one class: each category as often as the mean scores say.
    assert [row[0] for row in back[1:]] == ["0", "120"] and [row[2] for row in back[1:]] == ["1.5", "0.25"]
    assert sorted(row[1] for row in back[1:]) == ["current", "former"]
    assert csv_text(table.header, back).startswith("age,smoker,dose,ward\n60,never,-0.5,2\n")


def test_the_order_of_columns_is_the_files(tmp_path):
    table = table_of(tmp_path, "ward,dose,age,smoker\n2,0,7,never\n")
    assert table.header == ("ward", "dose", "age", "smoker")
    assert rows_of(SyntheticExamples(table.x, table.y), table.header, schema_of()) == [["2", "0", "7", "never"]]


def test_numbers_are_within_bounds_and_rounded():
    made = np.array([[-9.0], [0.123456789], [0.49999999], [9.0]])
    assert Numeric(low=0.1, high=0.3).decode(made, made) == ["0.1", "0.22469", "0.3", "0.3"]
    assert Numeric(low=0.5, high=3.5, whole=True).decode(made, made) == ["1", "2", "3", "3"]
    assert Numeric(low=-1000, high=1000).decode(made, made) == ["-1000", "246.9", "1000", "1000"]


def test_bins_are_categories_and_numbers_lie_evenly_in_them():
    column = Numeric(low=0, high=1, bins=4)
    hot = np.array([column.encode(text) for text in ("0.3", "1", "0", "0.74")])
    assert column.size == 3 and column.most == 0.75
    # Centred one-hot vectors of the bins 1, 3, 0 and 2.
    assert hot @ hot.T == pytest.approx(np.eye(4) - 1 / 4)
    # Multiples of 0.618034, less whole numbers: 0.618034 and 0.236068, then divided by the four bins.
    assert column.decode(hot[:2], np.zeros(2, int)) == ["0.4045", "0.809"]
    made = np.array(column.decode(np.repeat(hot[:1], 1000, axis=0), np.zeros(1000, int)), float)
    assert np.sort(made) == pytest.approx(np.linspace(0.25, 0.5, 1000), abs=1e-3)


def test_bins_of_whole_numbers_have_whole_numbers():
    column = Numeric(low=0.5, high=4.5, whole=True, bins=2)
    hot = np.array([column.encode(text) for text in "1234"])
    assert hot[0] == hot[1] == -hot[2] == -hot[3]
    # 1 + 2 * 0.618 and 1 + 2 * 0.236, then the same from 3 on for 0.854 and 0.472.
    assert column.decode(hot, np.zeros(4, int)) == ["2", "1", "4", "3"]
    wide = Numeric(low=0, high=120, whole=True, bins=7)
    hot = np.array([wide.encode(str(age)) for age in range(121)])
    back = wide.decode(hot, np.arange(121))
    assert (np.array([wide.encode(text) for text in back]) == hot).all()


def test_a_schema_with_bins_has_a_radius_for_them(tmp_path):
    schema = SCHEMA.replace("high: 120, whole: true", "high: 120, whole: true, bins: 10")
    table = table_of(tmp_path, schema=schema)
    assert table.x.shape == (3, 12) and np.linalg.norm(table.x, axis=1).max() <= schema_of(schema).radius
    assert schema_of(schema).radius == pytest.approx(math.sqrt(0.9 + 2 / 3 + 0.25))


@pytest.mark.parametrize("probabilities", [(0.5, 0.5), (0.98, 0.02), (0.7, 0.2, 0.07, 0.03), (0.25,) * 4])
def test_categories_are_as_frequent_as_their_scores_say(probabilities):
    p, generator = np.array(probabilities), np.random.default_rng(0)
    column = Categorical(categories=tuple(range(len(p))))
    hot = np.array([column.encode(str(number)) for number in range(len(p))])
    covariance = hot.T @ (np.diag(p) - np.outer(p, p)) @ hot
    x = generator.multivariate_normal(p @ hot, covariance, size=4000)
    found = np.bincount(np.array(column.decode(x, np.zeros(4000, int))).astype(int), minlength=len(p)) / 4000
    # The mean score is off by its standard error, the choice by little more than one row.
    assert found == pytest.approx(p, abs=5 * math.sqrt(0.25 / 4000) * math.sqrt(p.max() * (1 - p.max()) * 4) + 2e-3)


LEVELS = (2, 3, 4, 2)


def generated(n, seed):
    """A table of four dependent categorical columns, some of whose categories are rare."""
    generator = np.random.default_rng(seed)
    first = (generator.random(n) < 0.4).astype(int)
    second = (generator.random((n, 3)) * [1, 0.8, 0.6] + np.outer(first, [0, 0.5, 0])).argmax(1)
    third = np.minimum((generator.random(n) ** 2 * 4).astype(int) + (second == 1) * (generator.random(n) < 0.5), 3)
    fourth = (generator.random(n) < 0.02 + 0.1 * (third == 3)).astype(int)
    return np.stack([first, second, third, fourth], axis=1)


def distance(one, other, columns):
    """Total variation distance of the joint frequencies of some columns."""
    shape = [LEVELS[column] for column in columns]
    shares = [
        np.bincount(np.ravel_multi_index(tuple(rows[:, columns].T), shape), minlength=math.prod(shape)) / len(rows)
        for rows in (one, other)
    ]
    return np.abs(shares[0] - shares[1]).sum() / 2


def test_marginals_are_close_beside_what_sampling_alone_does(tmp_path):
    names, n = "abcd", 5000
    columns = {name: Categorical(categories=tuple(range(size))) for name, size in zip(names, LEVELS, strict=True)}
    schema, records = TableSchema(columns=columns, label="a"), generated(n, 0)
    path = tmp_path / "t.csv"
    path.write_text(csv_text(list(names), records.tolist()))
    table = read_table(path, schema)
    generator = DpGaussian(examples=n, num_classes=2, low=-2, high=2, radius=schema.radius)
    planned = plan_release(generator, 10, 1e-6)
    made = generator.fit(table.x, table.y, planned.noise_multiplier, ExactDraws(b"sixteen bytes or more"))
    rows = np.array(rows_of(made, names, schema)).astype(int)
    fresh, shuffled = generated(n, 1), np.random.default_rng(2).permuted(records, axis=0)

    def mean(other, number):
        return np.mean([distance(records, other, list(some)) for some in itertools.combinations(range(4), number)])

    # One by one, as good as another sample of as many rows. For pairs, the shape of a Gaussian costs something, and
    # columns that do not depend on each other are much worse.
    assert mean(rows, 1) < 1.5 * mean(fresh, 1)
    assert mean(rows, 2) < min(2.5 * mean(fresh, 2), 0.6 * mean(shuffled, 2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("121,never,0,1", "row 2, column 'age': the value is not a number between 0 and 120"),
        ("-1,never,0,1", "row 2, column 'age': the value is not a number between 0 and 120"),
        ("1.5,never,0,1", "row 2, column 'age': the value is not a whole number"),
        ("x,never,0,1", "row 2, column 'age': the value is not a number between 0 and 120"),
        ("nan,never,0,1", "row 2, column 'age': the value is not a number between 0 and 120"),
        (",never,0,1", "row 2, column 'age': the value is missing"),
        ("1,secret,0,1", "row 2, column 'smoker': the value is none of the 3 public categories"),
        ("1,,0,1", "row 2, column 'smoker': the value is missing"),
        ("1,never,inf,1", "row 2, column 'dose': the value is not a number between -0.5 and 1.5"),
        ("1,never,0,3", "row 2, column 'ward': the value is none of the 2 public categories"),
        ("1,never,0", "row 2 has 3 cells; the header has 4"),
        ('1,"never,0,1', "not CSV"),
    ],
)
def test_a_row_that_is_not_allowed_is_named_and_its_value_is_not(tmp_path, rows, message):
    with pytest.raises(DataError) as caught:
        table_of(tmp_path, f"age,smoker,dose,ward\n60,never,0,2\n{rows}\n")
    assert message in str(caught.value) and str(tmp_path / "ward.csv") in str(caught.value)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header"),
        ("age,smoker,dose\n", "look at 'ward'"),
        ("age,smoker,dose,ward,name\n", "look at 'name'"),
        ("age,smoker,dose,ward,ward\n", "look at 'a name twice'"),
    ],
)
def test_another_header_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        table_of(tmp_path, text)
    with pytest.raises(DataError, match="cannot read the file"):
        read_table(tmp_path / "absent.csv", schema_of())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns: {}", "columns"),
        ("columns: {a: {kind: numeric, low: 1, high: 1}}", "low must be below high"),
        ("columns: {a: {kind: numeric, low: 0.2, high: 0.8, whole: true}}", "no whole number"),
        ("columns: {a: {kind: numeric, low: 1, high: 4, whole: true, bins: 5}}", "there are only 4 whole numbers"),
        ("columns: {a: {kind: numeric, low: 1, high: 4, bins: 1}}", "bins must be"),
        ("columns: {a: {kind: categorical, categories: [x]}}", "categories must be a list of at least 2"),
        ("columns: {a: {kind: categorical, categories: [1, '1']}}", "a category twice"),
        ("columns: {a: {kind: numeric, low: 0, high: 1}}\nlabel: a", "the name of a categorical column"),
        ("columns: {a: {kind: numeric, low: 0, high: 1}}\nlabel: b", "the name of a categorical column"),
        ("columns: {a: {kind: categorical, categories: [1, 2]}}\nlabel: a", "no column beside the label"),
        ("columns: {a: {kind: text}}", "columns.a.kind must be one of"),
    ],
)
def test_schemas_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        schema_of(text)


def test_rows_have_equal_digests_if_their_cells_are_equal(tmp_path):
    first = row_digests(table_of(tmp_path))
    other = row_digests(table_of(tmp_path, "ward,dose,age,smoker\n1,1.5,0,current\n2,-0.5,61,never\n"))
    assert first.shape == (3, 32) and first.dtype == np.float32
    assert (first[1] == other[0]).all() and not (first[0] == other[1]).all()
