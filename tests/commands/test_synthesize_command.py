import csv
import json
import shutil
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest

from tff_pdp import cli
from tff_pdp.digests import read_json
from tff_pdp.privacy.accounting.accountants import exact_gaussian_epsilon
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples
from tff_pdp.privacy.synthetic.table import TableSchema, read_table
from tff_pdp.registry.entries import Registry
from tff_pdp.settings import Finite, read_settings, read_yaml

SCHEMA = """
columns:
  age: {kind: numeric, low: 0, high: 120, whole: true}
  smoker: {kind: categorical, categories: [never, former, current]}
  dose: {kind: numeric, low: 0, high: 1.5}
  disease: {kind: categorical, categories: ["no", "yes"]}
label: disease
"""
BUDGET = ("--epsilon", "2", "--delta", "1e-6")


class Rows(Generator, tag="rows"):
    """A generator from outside the package, which copies the first record."""

    shift: Finite = 0.0
    why: str = ""

    @property
    def why_not_private(self):
        return self.why

    def event(self, noise_multiplier):
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def check(self, x, y):
        pass

    def fit(self, x, y, noise_multiplier, draws, *, ids=None):
        return SyntheticExamples(np.repeat(x[:1] + self.shift, self.examples, axis=0), np.repeat(y[:1], self.examples))


OUTSIDE = f"{__name__}:Rows"


@pytest.fixture
def ward(tmp_path):
    """A table of 2,000 rows whose smoking depends on disease, beside its schema."""
    generator = np.random.default_rng(0)
    sick = generator.random(2000) < 0.3
    smoker = np.where(generator.random(2000) < 0.2 + 0.5 * sick, "current", "never")
    age = np.clip(np.rint(generator.normal(50 + 10 * sick, 10)), 0, 120).astype(int)
    dose = np.round(generator.uniform(0, 1.5, 2000), 2)
    rows = zip(smoker, np.where(sick, "yes", "no"), age, dose, strict=True)
    path = tmp_path / "ward.csv"
    path.write_text("smoker,disease,age,dose\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    (tmp_path / "ward.yaml").write_text(SCHEMA)
    return path


def arguments_of(ward, *more, output="made.csv"):
    output = ward.with_name(output)
    return ["synthesize", ward, "--schema", ward.with_suffix(".yaml"), "--output", output, "--rows", 1500, *more]


def run(*arguments):
    return cli.main(list(map(str, arguments)))


def test_a_table_becomes_a_table_and_a_statement(ward, capsys):
    assert run(*arguments_of(ward, *BUDGET)) == 0
    made, stated = ward.with_name("made.csv"), ward.with_name("made.csv.privacy.json")
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{made}: 1500 synthetic rows",
        f"{stated}: epsilon 2 at delta 1e-06 for one row of the table, added or removed",
    ]
    # The table is one that the schema allows.
    schema = read_settings(TableSchema, read_yaml(ward.with_suffix(".yaml")), "ward.yaml")
    table = read_table(made, schema)
    assert table.header == ("smoker", "disease", "age", "dose") and len(table.cells) == 1500
    with open(made, newline="") as file:
        rows = list(csv.DictReader(file))
    sick = [row for row in rows if row["disease"] == "yes"]
    # 2,000 records, noise of some 7 on a count, and as much as sampling moves a share.
    assert len(sick) / 1500 == pytest.approx(0.3, abs=0.05)
    share = np.mean([row["smoker"] == "current" for row in sick])
    assert share == pytest.approx(0.7, abs=0.12)


def test_the_statement_is_true_and_has_nothing_of_the_records(ward):
    run(*arguments_of(ward, *BUDGET))
    stated = read_json(ward.with_name("made.csv.privacy.json"))
    assert stated["unit"] == "one row of the table" and stated["adjacency"] == "add_or_remove_one"
    assert stated["event"]["name"] == "GaussianDpEvent" and stated["claim"] == "formal"
    assert exact_gaussian_epsilon(stated["event"]["noise_multiplier"], 1e-6) <= stated["epsilon"] <= 2
    assert stated["schema"]["columns"]["age"]["high"] == 120 and stated["generator"]["examples"] == 1500
    assert any("schema" in one for one in stated["public"])
    # Another table, of other size and content, has the same statement but for what was made of it.
    other = ward.with_name("other.csv")
    other.write_text("smoker,disease,age,dose\n" + "never,no,3,0\n" * 700)
    shutil.copy(ward.with_suffix(".yaml"), other.with_suffix(".yaml"))
    run(*arguments_of(other, *BUDGET, output="again.csv"))
    again = read_json(other.with_name("again.csv.privacy.json"))
    assert {key for key in stated if stated[key] != again[key]} == {"output_sha256"}
    assert stated.keys() == again.keys()


def test_releases_of_one_table_add_up(ward, capsys):
    run(*arguments_of(ward, *BUDGET, "--json"))
    first = json.loads(capsys.readouterr().out)
    run(*arguments_of(ward, *BUDGET, "--json", output="second.csv"))
    second = json.loads(capsys.readouterr().out)
    assert first["composed"]["releases_on_record"] == 1 and first["composed"]["epsilon"] == first["epsilon"]
    assert second["composed"]["releases_on_record"] == 2
    together = exact_gaussian_epsilon(second["noise_multiplier"] / 2**0.5, 1e-6)
    assert second["composed"]["epsilon"] == pytest.approx(together, rel=1e-4)
    assert ward.with_name("made.csv").read_bytes() != ward.with_name("second.csv").read_bytes()
    # The total depends on other releases' records.
    assert "composed" not in read_json(ward.with_name("second.csv.privacy.json"))
    run(*arguments_of(ward, *BUDGET, output="third.csv"))
    assert "3 releases on record use these records; together: epsilon" in capsys.readouterr().out


def test_nothing_is_replaced_and_nothing_is_released_then(ward, tmp_path, monkeypatch, capsys):
    for name in ("made.csv", "made.csv.privacy.json"):
        path = ward.with_name(name)
        path.write_text("mine")
        assert run(*arguments_of(ward, *BUDGET)) == 2
        assert f"{path} exists, and is not replaced" in capsys.readouterr().err
        assert path.read_text() == "mine"
        path.unlink()
    assert Registry().entries() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ward.csv", "ward.yaml"]


def test_a_record_out_of_bounds_is_refused_before_anything_is_released(ward, capsys):
    with open(ward, "a") as file:
        file.write("never,no,121,0\n")
    assert run(*arguments_of(ward, *BUDGET)) == 2
    expected = f"{ward}: row 2001, column 'age': the value is not a number between 0 and 120"
    assert capsys.readouterr().err == f"tff-pdp synthesize: {expected}\n"
    assert Registry().entries() == [] and not ward.with_name("made.csv").exists()


def test_too_few_rows_are_refused_and_counted(ward, capsys):
    ward.write_text("smoker,disease,age,dose\nnever,no,3,0\n")
    assert run(*arguments_of(ward, *BUDGET)) == 2
    assert "The release has been made: its cost counts" in capsys.readouterr().err
    assert len(Registry().entries()) == 1 and not ward.with_name("made.csv").exists()


def test_images_become_images(tmp_path):
    generator = np.random.default_rng(0)
    y = generator.integers(0, 2, 1000).astype(np.uint8)
    x = np.clip(generator.normal(60 + 80 * y[:, None, None], 10, (1000, 4, 4)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "in.npz", x=x, y=y)
    options = ("--high", "255", "--num-classes", "4", "--pool", "2", "--radius", "400")
    common = ("--rows", "200", "--epsilon", "10", "--delta", "1e-5")
    assert run("synthesize", tmp_path / "in.npz", "--output", tmp_path / "out.npz", *common, *options) == 0
    with np.load(tmp_path / "out.npz") as made:
        assert made["x"].shape == (200, 4, 4) and made["x"].dtype == np.uint8 and made["y"].dtype == np.uint8
        assert set(made["y"].tolist()) == {0, 1}
        for label in (0, 1):
            assert made["x"][made["y"] == label].mean() == pytest.approx(60 + 80 * label, abs=3)
    stated = read_json(tmp_path / "out.npz.privacy.json")
    assert stated["unit"] == "one example" and stated["generator"]["pool"] == 2 and "schema" not in stated


def test_a_dry_run_tells_the_noise_and_releases_nothing(ward, tmp_path, capsys):
    assert run(*arguments_of(ward, *BUDGET, "--dry-run", "--set", "count_share=0.5")) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert Registry().entries() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ward.csv", "ward.yaml"]
    lines = told.out.splitlines()
    assert lines[0] == (
        "nothing was released; a release would have epsilon 2 at delta 1e-06 for one row of the table, added or removed"
    )
    assert "  count share: 0.5" not in lines and "  count_share: 0.5" in lines
    # Two classes; two numbers, and three categories in two coordinates: 2 (1 + 4) + 4 * 5 / 2.
    assert "  released values: 20" in lines
    assert run(*arguments_of(ward, *BUDGET, "--dry-run", "--set", "count_share=0.5", "--json")) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dry_run"] is True and planned["generator"]["count_share"] == 0.5
    noise = planned["noise_multiplier"]
    assert planned["release"] == {
        "released_values": 20,
        "noise_deviation_of_a_class_count": pytest.approx(2 * noise),
        "class_appears_from_noised_count": pytest.approx(8 * noise),
    }
    # The real release has the same statement, but for the digest.
    run(*arguments_of(ward, *BUDGET, "--set", "count_share=0.5"))
    stated = read_json(ward.with_name("made.csv.privacy.json"))
    assert {key for key in stated if stated[key] != planned.get(key)} == {"output_sha256"}


def test_a_dry_run_checks_the_records(ward, capsys):
    with open(ward, "a") as file:
        file.write("never,no,121,0\n")
    assert run(*arguments_of(ward, *BUDGET, "--dry-run")) == 2
    assert "row 2001, column 'age'" in capsys.readouterr().err


def test_a_generator_from_outside_makes_tables_and_arrays(ward, tmp_path):
    assert run(*arguments_of(ward, *BUDGET, "--generator", OUTSIDE)) == 0
    first, made = ward.read_text().splitlines()[1], ward.with_name("made.csv").read_text().splitlines()
    smoker, disease, age, dose = first.split(",")
    assert made[1:] == [f"{smoker},{disease},{age},{dose.removesuffix('.0')}"] * 1500
    stated = read_json(ward.with_name("made.csv.privacy.json"))
    assert stated["generator"] == {
        "kind": "rows",
        "examples": 1500,
        "num_classes": 2,
        "low": -2.0,
        "high": 2.0,
        "shift": 0.0,
        "why": "",
    }
    assert stated["generator_origin"].startswith(OUTSIDE) and stated["release"] == {}
    np.savez(tmp_path / "in.npz", x=np.full((4, 3), 0.25))
    options = ("--rows", "5", *BUDGET, "--generator", OUTSIDE, "--set", "shift=0.5")
    assert run("synthesize", tmp_path / "in.npz", "--output", tmp_path / "out.npz", *options) == 0
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays.files == ["x"] and arrays["x"].tolist() == [[0.75] * 3] * 5


def test_a_generator_that_is_not_private_says_so_everywhere(ward, capsys):
    not_private = ("--generator", OUTSIDE, "--set", "why=it copies a record")
    assert run(*arguments_of(ward, *BUDGET, *not_private, "--dry-run")) == 0
    told = capsys.readouterr()
    warning = "synthesize: warning: the synthetic data are not private, and nothing is claimed: it copies a record\n"
    assert told.err == warning and "a release would have no guarantee" in told.out and "epsilon" not in told.out
    assert run(*arguments_of(ward, *BUDGET, *not_private)) == 0
    told = capsys.readouterr()
    assert told.err.startswith(warning) and told.out.endswith("made.csv.privacy.json: no guarantee\n")
    stated = read_json(ward.with_name("made.csv.privacy.json"))
    assert (stated["claim"], stated["claim_reason"], stated["epsilon"]) == ("none", "it copies a record", None)
    # No later total can hold either.
    assert run(*arguments_of(ward, *BUDGET, output="second.csv")) == 0
    assert "2 releases on record use these records; together: no epsilon holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.txt", "--output", "b.txt"), "INPUT is a.txt; it must end with .csv or .npz"),
        (("a.csv", "--output", "b.npz"), "--output is b.npz; it must end with .csv, as INPUT does"),
        (("a.csv", "--output", "b.csv"), "a table needs --schema"),
        (("a.npz", "--output", "b.npz", "--schema", "a.yaml"), "--schema is for tables"),
        (("a.csv", "--output", "b.csv", "--schema", "a.yaml", "--num-classes", "3"), "--num-classes is for arrays"),
        (("a.npz", "--output", "b.npz", "--generator", "gan"), "gan"),
        (("a.npz", "--output", "absent/b.npz"), "the folder absent does not exist"),
        (("a.npz", "--output", "b.npz", "--low", "2"), "low is 2 and high is 1; low must be below high"),
        (("a.npz", "--output", "b.npz", "--pool", "100"), "pool must be a whole number"),
        (("a.npz", "--output", "b.npz", "--set", "count_share=0.9"), "the sum of their squares must be at most"),
        (("a.npz", "--output", "b.npz", "--set", "count_share"), "--set 'count_share' must have the form KEY=VALUE"),
        (("a.npz", "--output", "b.npz", "--set", "count_share=[1"), "--set count_share: not valid YAML"),
        (("a.npz", "--output", "b.npz", "--set", "count_share=2"), "dp_gaussian: count_share must be a number above 0"),
        (("a.npz", "--output", "b.npz", "--set", "count_shar=0.2"), "key count_shar; did you mean count_share?"),
        (("a.npz", "--output", "b.npz", "--set", "examples=7"), "--set examples: use the option --rows"),
        (("a.npz", "--output", "b.npz", "--set", "num_classes=7"), "use the option --num-classes"),
        (("a.npz", "--output", "b.npz", "--generator", "tff_pdp.kinds:Kinds"), "not a subclass of Generator"),
        (("a.npz", "--output", "b.npz", "--generator", OUTSIDE, "--pool", "2"), "unknown key pool"),
        (("a.npz", "--output", "b.npz"), "a.npz: cannot read the file"),
    ],
)
def test_options_that_do_not_fit(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("synthesize", *arguments, "--rows", "5", *BUDGET) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_and_the_command_need_no_tensorflow(ward):
    words = list(map(str, arguments_of(ward, *BUDGET)))
    program = (
        "import sys; from tff_pdp import cli; status = cli.main(sys.argv[1:]); "
        "sys.exit(status or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, *words], capture_output=True, check=False).returncode == 0
