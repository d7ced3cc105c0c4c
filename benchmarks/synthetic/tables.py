"""Measures how well `tff-pdp synthesize` keeps tables: marginals and models of the School data and the heart data.

Marginals are compared with those of the training records. Beside the synthetic table stand:

* noise: the Gaussian noise of a direct release of all one- and two-way marginals in the same budget, in expectation;
* direct: such a release, with negative counts set to 0. It gives histograms, but no table;
* sample: as many records as the table has rows, drawn with replacement, without privacy;
* independent: the training records with every column in a random order of its own, without privacy.

A model trained on the synthetic table, and one trained on the training records, are tested on records that nothing
else uses. No setting was chosen by these tests. Each value is the mean over the seeds.

  python -m benchmarks.synthetic.tables --data DIR
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge

from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.sources.silo_files import read_mat_cells
from benchmarks.machine import RESULTS, describe_machine
from benchmarks.synthetic.marginals import BINS, bin_cells, distances, marginals, noise_alone, release_directly
from tff_pdp.commands.synthesize import TABLE_RANGE
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.gaussian import DpGaussian
from tff_pdp.privacy.synthetic.release import plan_release
from tff_pdp.privacy.synthetic.table import Categorical, Numeric, Table, TableSchema, csv_text, read_table, rows_of
from tff_pdp.settings import read_settings

OUTPUT = RESULTS / "synthetic_tables.json"
EPSILONS, DELTA, SEEDS = (1.0, 10.0), 1e-5, 3
# One of this many records is for testing.
TEST_SHARE = 5
# Column, and the features of School that say which category a pupil has. Pupils without one of the bands exist.
SCHOOL_CATEGORIES = {
    "year": range(0, 3),
    "sex": range(5, 7),
    "band": range(7, 10),
    "ethnicity": range(10, 21),
    "school_sex": range(21, 24),
    "denomination": range(24, 27),
}
UNKNOWN = "unknown"
SCHOOL_NUMBERS = {"free_meals": (3, 100), "top_band": (4, 100)}
# Names of the first ten columns of the heart data; the last of all columns is the disease.
HEART = ("age", "sex", "pain", "pressure", "cholesterol", "sugar", "ecg", "rate", "angina", "depression")
HEART_FILES = ("cleveland", "hungarian", "switzerland", "va")


class Subject(NamedTuple):
    """A table to be synthesized.

    Attributes:
      name: name in results.
      schema: public description of the table.
      target: the column that models predict: numbers by ridge regression, two categories by logistic regression.
      rows: number of synthetic rows, chosen without looking at the number of records.
      train: records of which synthetic tables are made.
      test: records on which models are tested.
    """

    name: str
    schema: TableSchema
    target: str
    rows: int
    train: Table
    test: Table


def school_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Reads the pupils of all schools as rows of a table, with names of the columns."""
    cells = read_mat_cells(path)
    x = np.concatenate([features for features, _ in cells]).astype(np.int64)
    scores = np.concatenate([labels.ravel() for _, labels in cells]).astype(np.int64)
    columns: dict[str, list[str]] = {}
    for name, (place, _) in SCHOOL_NUMBERS.items():
        columns[name] = [str(value) for value in x[:, place].tolist()]
    for name, places in SCHOOL_CATEGORIES.items():
        marks = x[:, list(places)]
        known = marks.sum(axis=1) == 1
        chosen = np.where(known, marks.argmax(axis=1), -1)
        columns[name] = [str(place) if place >= 0 else UNKNOWN for place in chosen.tolist()]
    columns["score"] = [str(score) for score in scores.tolist()]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def school_schema(label: str | None, bins: int | None) -> TableSchema:
    """Returns the public description of the School data: scores lie between 1 and 70 by the rules of the exam."""
    number = {"kind": "numeric", "whole": True, "bins": bins}
    columns: dict[str, Any] = {name: {**number, "low": 0, "high": high} for name, (_, high) in SCHOOL_NUMBERS.items()}
    for name, places in SCHOOL_CATEGORIES.items():
        categories = [str(place) for place in range(len(places))]
        columns[name] = {"kind": "categorical", "categories": [*categories, UNKNOWN] if name == "band" else categories}
    columns["score"] = {**number, "low": 1, "high": 70}
    return read_settings(TableSchema, {"columns": columns, "label": label}, "school")


def heart_rows(folder: Path) -> tuple[list[str], list[list[str]]]:
    """Reads the patients of four hospitals who have all of the first ten values, with names of the columns."""
    rows = []
    for name in HEART_FILES:
        for line in (folder / f"processed.{name}.data").read_text().split():
            cells = line.split(",")
            if "?" not in cells[: len(HEART)]:
                numbers = [f"{float(cell):g}" for cell in cells[: len(HEART)]]
                rows.append([*numbers, "yes" if float(cells[-1]) > 0 else "no"])
    return [*HEART, "disease"], rows


def heart_schema(bins: int | None) -> TableSchema:
    """Returns a public description of the heart data, with bounds wide enough for any adult."""

    def number(low: float, high: float) -> dict[str, Any]:
        return {"kind": "numeric", "low": low, "high": high, "bins": bins}

    def categories(*names: str) -> dict[str, Any]:
        return {"kind": "categorical", "categories": list(names)}

    columns = {
        "age": {**number(0, 100), "whole": True},
        "sex": categories("0", "1"),
        "pain": categories("1", "2", "3", "4"),
        "pressure": number(0, 250),
        # 0 stands for a missing value in two of the hospitals.
        "cholesterol": number(0, 700),
        "sugar": categories("0", "1"),
        "ecg": categories("0", "1", "2"),
        "rate": number(0, 250),
        "angina": categories("0", "1"),
        "depression": number(-5, 10),
        "disease": categories("no", "yes"),
    }
    return read_settings(TableSchema, {"columns": columns, "label": "disease"}, "heart")


def read_subjects(data: Path) -> list[Subject]:
    """Reads all tables from the folder of data, divided into records for training and for testing."""
    school, heart = school_rows(data / "school" / "school.mat"), heart_rows(data / "heart")
    return [
        _subject("school", school_schema(None, None), "score", 10_000, *school),
        _subject("school, bins", school_schema(None, BINS), "score", 10_000, *school),
        _subject("school by band", school_schema("band", None), "score", 10_000, *school),
        _subject("school by band, bins", school_schema("band", BINS), "score", 10_000, *school),
        _subject("heart by disease", heart_schema(None), "disease", 1_000, *heart),
        _subject("heart by disease, bins", heart_schema(BINS), "disease", 1_000, *heart),
    ]


def measure(subject: Subject, epsilon: float, seeds: int) -> dict[str, Any]:
    """Returns the distances of marginals and the errors of models for one table and budget, means over the seeds."""
    schema, header = subject.schema, subject.train.header
    generator = DpGaussian(
        examples=subject.rows,
        num_classes=len(schema.classes),
        **TABLE_RANGE,
        **DpGaussian.table_settings(schema.radius),
    )
    planned = plan_release(generator, epsilon, DELTA)
    train = bin_cells(header, subject.train.cells, schema)
    exact = marginals(train)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("synthetic", "direct", "sample", "independent")}
    errors = []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        draws = ExactDraws(f"no secret: a benchmark with the seed {seed}".encode())
        made = generator.fit(subject.train.x, subject.train.y, planned.noise_multiplier, draws)
        cells = rows_of(made, header, schema)
        tables = {
            "synthetic": marginals(bin_cells(header, cells, schema)),
            "direct": release_directly(exact, planned.noise_multiplier, random.standard_normal),
            "sample": marginals(train._replace(places=random.choice(train.places, subject.rows))),
            "independent": marginals(train._replace(places=random.permuted(train.places, axis=0))),
        }
        for name, table in tables.items():
            found[name].append(distances(table, exact))
        errors.append(test_error(subject, header, cells))
    columns = ("one_way", "two_way", "worst")
    rows = {name: np.mean(each, axis=0).tolist() for name, each in found.items()}
    rows["noise"] = list(noise_alone(exact, planned.noise_multiplier))
    return {
        "table": subject.name,
        "epsilon": epsilon,
        "delta": DELTA,
        "noise_multiplier": planned.noise_multiplier,
        "synthetic_rows": subject.rows,
        "training_records": len(train.places),
        "test_records": len(subject.test.cells),
        "distances": {name: dict(zip(columns, row, strict=True)) for name, row in rows.items()},
        "spread_of_two_way": float(np.ptp([each[1] for each in found["synthetic"]])),
        "test_error": {
            "synthetic": float(np.mean(errors)),
            "synthetic_by_seed": errors,
            "records": test_error(subject, header, subject.train.cells),
            "constant": constant_error(subject),
        },
    }


def test_error(subject: Subject, header: Sequence[str], cells: Sequence[Sequence[str]]) -> float:
    """Trains a model on rows, and tests it on the test records.

    The error is the root mean squared error of numbers, in the column's unit, or the share of wrong categories. Rows
    with a single category of the target make a model that always answers with this category.
    """
    x, y = _features(subject, header, cells), _targets(subject, header, cells)
    test_x = _features(subject, subject.test.header, subject.test.cells)
    test_y = _targets(subject, subject.test.header, subject.test.cells)
    if not isinstance(subject.schema.columns[subject.target], Categorical):
        return _root_mean_square(Ridge().fit(x, y).predict(test_x) - test_y)
    if len(np.unique(y)) == 1:
        return float((test_y != y[0]).mean())
    return float((LogisticRegression(max_iter=1000).fit(x, y).predict(test_x) != test_y).mean())


def constant_error(subject: Subject) -> float:
    """Returns the error, as in `test_error`, of the training records' mean or most frequent category."""
    train = _targets(subject, subject.train.header, subject.train.cells)
    test = _targets(subject, subject.test.header, subject.test.cells)
    if isinstance(subject.schema.columns[subject.target], Categorical):
        return float((test != np.bincount(train.astype(np.int64)).argmax()).mean())
    return _root_mean_square(train.mean() - test)


def table_text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: mean distance of one- and two-way marginals in percent, and errors of models."""
    names = ("synthetic", "noise", "direct", "sample", "independent")
    lines = [
        f"| table | ε | {' | '.join(names)} | model: synthetic | records | constant |",
        "|---" * (len(names) + 5) + "|",
    ]
    for row in rows:
        each = [f"{row['distances'][name]['one_way']:.1%} / {row['distances'][name]['two_way']:.1%}" for name in names]
        form: Callable[[float], str] = "{:.1%}".format if row["test_error"]["constant"] < 1 else "{:.2f}".format
        errors = [form(row["test_error"][name]) for name in ("synthetic", "records", "constant")]
        cells = [row["table"], f"{row['epsilon']:g}", *each, *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures all tables at all budgets, prints the results, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with school/ and heart/")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"default {SEEDS}")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    rows = [measure(subject, epsilon, options.seeds) for subject in read_subjects(options.data) for epsilon in EPSILONS]
    print(table_text(rows))
    found = {"machine": describe_machine(), "seeds": options.seeds, "tables": rows}
    options.output.write_text(json.dumps(found, indent=2) + "\n")


def _subject(
    name: str, schema: TableSchema, target: str, rows: int, header: Sequence[str], cells: Sequence[Sequence[str]]
) -> Subject:
    for_test = keyed_uint64(0, "synthetic tables", np.arange(len(cells))) % np.uint64(TEST_SHARE) == 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.csv"

        def part(wanted: bool) -> Table:
            chosen = [row for row, is_test in zip(cells, for_test.tolist(), strict=True) if is_test == wanted]
            path.write_text(csv_text(header, chosen))
            return read_table(path, schema)

        return Subject(name, schema, target, rows, train=part(False), test=part(True))


def _features(subject: Subject, header: Sequence[str], cells: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns the features of all columns but the target, float64 `[rows, features]`."""
    blocks = []
    for name, column in subject.schema.columns.items():
        if name != subject.target:
            place = header.index(name)
            # Of a number, a model sees the number and not the bin.
            column = msgspec.structs.replace(column, bins=None) if isinstance(column, Numeric) else column
            blocks.append(np.array([column.encode(row[place]) for row in cells]).reshape(len(cells), -1))
    return np.concatenate(blocks, axis=1)


def _targets(subject: Subject, header: Sequence[str], cells: Sequence[Sequence[str]]) -> np.ndarray:
    column, place = subject.schema.columns[subject.target], header.index(subject.target)
    if isinstance(column, Categorical):
        return np.array([column.index(row[place]) for row in cells])
    return np.array([float(row[place]) for row in cells])


def _root_mean_square(differences: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(differences))))


if __name__ == "__main__":
    main()
