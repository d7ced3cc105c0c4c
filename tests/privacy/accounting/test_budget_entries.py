import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import OwnBudget, read_budget_file


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_csv_file_with_and_without_deltas(tmp_path):
    path = write(tmp_path, "budgets.csv", "silo,epsilon,delta\nclinic, 1.5 ,1e-5\n\n007,inf,\n")
    budgets, places = read_budget_file(path)
    assert budgets == {
        "clinic": OwnBudget(epsilon=1.5, delta=1e-5),
        "007": OwnBudget(epsilon=float("inf")),
    }
    assert places == {"clinic": f"{path}, line 2: clinic", "007": f"{path}, line 4: 007"}
    assert read_budget_file(write(tmp_path, "short.CSV", "silo,epsilon\na,1\n"))[0]["a"].delta is None


def test_a_csv_file_as_a_spreadsheet_writes_it(tmp_path):
    path = write(tmp_path, "budgets.csv", b'\xef\xbb\xbfsilo,epsilon\r\n"b, the second",2\r\n')
    assert {name: own.epsilon for name, own in read_budget_file(path)[0].items()} == {"b, the second": 2.0}


def test_a_yaml_file_keeps_names_as_written(tmp_path):
    path = write(tmp_path, "budgets.yaml", "007: 1e-1\nclinic: {epsilon: 2, delta: 1e-6}\nfree: .inf\n")
    assert read_budget_file(path)[0] == {
        "007": 0.1,
        "clinic": OwnBudget(epsilon=2.0, delta=1e-6),
        "free": float("inf"),
    }
    assert read_budget_file(str(write(tmp_path, "budgets.yml", "a: 1\n")))[0] == {"a": 1.0}


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("b.csv", "", r"b\.csv: the file is empty"),
        ("b.csv", "silo;epsilon\na;1\n", r"b\.csv, line 1: the header must be .*, not 'silo;epsilon'"),
        ("b.csv", "silo,epsilon\na,1\nb\n", r"b\.csv, line 3: 'b' must have a value for each of silo, epsilon"),
        ("b.csv", "silo,epsilon\n,1\n", r"b\.csv, line 2: ',1' must have a value"),
        ("b.csv", "silo,epsilon\na,1,2\n", r"b\.csv, line 2: 'a,1,2' must have a value"),
        ("b.csv", "silo,epsilon\na,1\n\na,2\n", r"line 4: a: silo 'a' has a budget already, at .*b\.csv, line 2: a"),
        ("b.csv", "silo,epsilon\na,0\n", r"b\.csv, line 2: a: epsilon must be a number above 0, not 0\.0"),
        ("b.csv", "silo,epsilon\na,nan\n", r"line 2: a: epsilon must be a number above 0, not nan"),
        ("b.csv", "silo,epsilon\na,\n", r"line 2: a: epsilon must be a number above 0, not ''"),
        ("b.csv", "silo,epsilon,delta\na,1,1\n", r"line 2: a: delta must be a number above 0 and below 1.*, not 1\.0"),
        ("b.csv", 'silo,epsilon\n"a,1\n', r"b\.csv, line 2: not valid CSV"),
        ("b.csv", b"silo,epsilon\n\xff,1\n", r"b\.csv: not UTF-8 text \(error at byte 13\)"),
        ("b.yaml", "", r"b\.yaml: the file must be a mapping"),
        ("b.yaml", "- 1\n", r"b\.yaml: the file must be a mapping"),
        ("b.yaml", "a: 1\nb: [\n", r"b\.yaml: not valid YAML"),
        ("b.yaml", "a: 1\nb: 2\na: 3\n", r"b\.yaml: .*the key 'a' occurs more than once.* line 3"),
        ("b.yaml", "a: -1\n", r"b\.yaml: a must be a number above 0, or a mapping, not -1"),
        ("b.yaml", "a: yes\n", r"b\.yaml: a must be .*, not 'yes'"),
        ("b.yaml", "a:\n", r"b\.yaml: a must be .*, not None"),
        ("b.yaml", "\na: {epsilon: 1, delta: 0}\n", r"b\.yaml: a\.delta must be a number above 0 and below 1"),
        ("b.yaml", "a: {delta: 1e-5}\n", r"b\.yaml: missing key a\.epsilon"),
        ("b.yaml", "a: {epsilon: 1, delat: 1e-5}\n", r"unknown key a\.delat; did you mean delta\?"),
        ("b.yaml", "a: {epsilon: 1, epsilon: 9}\n", r"the key 'epsilon' occurs more than once"),
        ("b.yaml", "[a, b]: 1\n", r"a key must be plain text"),
        ("b.json", "{}", r"b\.json: a file of budgets must end in \.csv"),
    ],
)
def test_errors_name_the_file_and_the_line_or_the_silo(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        read_budget_file(write(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot read the file \(No such file"):
        read_budget_file(tmp_path / "nowhere.csv")
