import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.budgets import BudgetEntry, mapping_entries, read_budget_file


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_csv_file_with_and_without_deltas(tmp_path):
    path = write(tmp_path, "budgets.csv", "silo,epsilon,delta\nclinic, 1.5 ,1e-5\n\n007,inf,\n")
    assert read_budget_file(path) == {
        "clinic": BudgetEntry(f"{path}, line 2: clinic", 1.5, 1e-5),
        "007": BudgetEntry(f"{path}, line 4: 007", float("inf"), None),
    }
    path = write(tmp_path, "short.CSV", "silo,epsilon\na,1\n")
    assert read_budget_file(path)["a"].delta is None


def test_a_csv_file_as_a_spreadsheet_writes_it(tmp_path):
    path = write(tmp_path, "budgets.csv", b'\xef\xbb\xbfsilo,epsilon\r\n"b, the second",2\r\n')
    assert {name: entry.epsilon for name, entry in read_budget_file(path).items()} == {"b, the second": 2.0}


def test_a_yaml_file_keeps_names_as_written(tmp_path):
    path = write(tmp_path, "budgets.yaml", "007: 1e-1\nclinic: {epsilon: 2, delta: 1e-6}\nfree: .inf\n")
    assert read_budget_file(path) == {
        "007": BudgetEntry(f"{path}, line 1: 007", 0.1, None),
        "clinic": BudgetEntry(f"{path}, line 2: clinic", 2.0, 1e-6),
        "free": BudgetEntry(f"{path}, line 3: free", float("inf"), None),
    }
    path = write(tmp_path, "budgets.yml", "a: 1\n")
    assert read_budget_file(str(path))["a"].epsilon == 1.0


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("b.csv", "", r"b\.csv: the file is empty"),
        ("b.csv", "silo;epsilon\na;1\n", r"b\.csv, line 1: the header is 'silo;epsilon'"),
        ("b.csv", "silo,epsilon\na,1\nb\n", r"b\.csv, line 3: 'b' does not have one value for each of silo, epsilon"),
        ("b.csv", "silo,epsilon\n,1\n", r"b\.csv, line 2: ',1' does not"),
        ("b.csv", "silo,epsilon\na,1,2\n", r"b\.csv, line 2: 'a,1,2' does not"),
        ("b.csv", "silo,epsilon\na,1\n\na,2\n", r"line 4: a: silo 'a' has a budget already, at .*b\.csv, line 2: a"),
        ("b.csv", "silo,epsilon\na,0\n", r"b\.csv, line 2: a\.epsilon is '0'; epsilon must be positive"),
        ("b.csv", "silo,epsilon\na,nan\n", r"a\.epsilon is 'nan'"),
        ("b.csv", "silo,epsilon\na,\n", r"a\.epsilon is ''; it must be a number"),
        ("b.csv", "silo,epsilon,delta\na,1,1\n", r"a\.delta is '1'; delta must lie strictly"),
        ("b.csv", 'silo,epsilon\n"a,1\n', r"b\.csv, line 2: not valid CSV"),
        ("b.csv", b"silo,epsilon\n\xff,1\n", r"b\.csv: not UTF-8 text \(byte 13\)"),
        ("b.yaml", "", r"b\.yaml: the file must map"),
        ("b.yaml", "- 1\n", r"b\.yaml: the file must map"),
        ("b.yaml", "a: 1\nb: [\n", r"b\.yaml: not valid YAML"),
        ("b.yaml", "a: 1\nb: 2\na: 3\n", r"b\.yaml, line 3: a: silo 'a' has a budget already, at .*line 1: a"),
        ("b.yaml", "a: -1\n", r"b\.yaml, line 1: a is -1; epsilon must be positive"),
        ("b.yaml", "a: yes\n", r"line 1: a is True; it must be a number"),
        ("b.yaml", "a:\n", r"line 1: a is None"),
        ("b.yaml", "\na: {epsilon: 1, delta: 0}\n", r"b\.yaml, line 2: a\.delta is 0"),
        ("b.yaml", "a: {delta: 1e-5}\n", r"line 1: a\.epsilon is missing"),
        ("b.yaml", "a: {epsilon: 1, delat: 1e-5}\n", r"line 1: a has the unknown key `delat`"),
        ("b.yaml", "a: {epsilon: 1, epsilon: 9}\n", r"line 1: a\.epsilon occurs more than once"),
        ("b.yaml", "[a, b]: 1\n", r"line 1: the name of a silo must be plain text"),
        ("b.json", "{}", r"b\.json: a file of budgets must end in \.csv"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        read_budget_file(write(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot read the file of budgets \(No such file"):
        read_budget_file(tmp_path / "nowhere.csv")


def test_entries_of_a_configuration():
    assert mapping_entries("budgets.silos", {7: "1e-1", "a": {"epsilon": 2}}) == {
        "7": BudgetEntry("budgets.silos.7", 0.1, None),
        "a": BudgetEntry("budgets.silos.a", 2.0, None),
    }
    with pytest.raises(ConfigError, match=r"budgets\.silos\.7: silo '7' has a budget already"):
        mapping_entries("budgets.silos", {7: 1, "7": 2})
