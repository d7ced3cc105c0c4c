"""The runner of TFF's own tests tells new failures from known ones, and its page is complete."""

import subprocess
import sys

import pytest

from tests.places import ROOT
from tools.tff_conformance.__main__ import differences, read_results
from tools.tff_conformance.known import CLASSES, PAGE, KnownFailure, known_failures, known_files

PAGE_TEXT = PAGE.read_text()
# Results as absltest writes them.
RESULTS = """<?xml version="1.0"?>
<testsuites tests="4"><testsuite name="Sums">
<testcase name="test_sum" status="run" result="completed" classname="__main__.Sums"/>
<testcase name="test_mean" status="run" result="completed" classname="__main__.Sums"><failure message="2"/></testcase>
<testcase name="test_select" status="run" result="completed" classname="__main__.Sums"><error message="no"/></testcase>
<testcase name="test_jax" status="notrun" result="suppressed" classname="__main__.Sums"/>
</testsuite></testsuites>
"""
# A test file like TFF's own: it imports a module that is in no wheel, and sets a context.
TEST_FILE = """
from absl.testing import absltest
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.aggregators import only_in_the_tree

class SumTest(absltest.TestCase):
  def test_engine(self):
    self.assertEqual(type(tff.framework.get_context_stack().current).__name__, only_in_the_tree.ENGINE)

  def test_sum(self):
    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def add(values):
      return tff.federated_sum(values), values
    total, values = add([1, 2, 3])
    self.assertEqual(total, 6)
    self.assertIsInstance(total, np.generic)
    self.assertEqual(values, [1, 2, 3])

  @tff.test.with_context(tff.backends.native.create_async_local_cpp_execution_context)
  def test_asynchronous(self):
    raise ValueError

if __name__ == "__main__":
  tff.backends.native.set_sync_local_cpp_execution_context()
  absltest.main()
"""


def failure(test: str) -> KnownFailure:
    return KnownFailure("a.py", test, "fault", True, "-")


def test_outcomes_are_read_from_the_results_of_absltest():
    assert read_results(RESULTS) == {
        "Sums.test_sum": "passes",
        "Sums.test_mean": "fails",
        "Sums.test_select": "fails",
        "Sums.test_jax": "is skipped",
    }
    assert read_results(RESULTS[:200]) is None


def test_only_failures_that_the_page_does_not_list_are_new():
    found = {"a.py": read_results(RESULTS), "b.py": None}
    known = [failure("Sums.test_mean"), failure("Sums.test_sum"), failure("Sums.test_jax")]
    new, gone = differences(found, known)
    assert new == [("b.py", "(the file ended without results)"), ("a.py", "Sums.test_select")]
    assert gone == [("a.py", "Sums.test_sum")]


def test_the_page_counts_the_failures_that_it_lists():
    rows = known_failures(PAGE_TEXT)
    assert len({(row.file, row.test) for row in rows}) == len(rows) > 0
    assert {row.file for row in rows} <= set(known_files(PAGE_TEXT))
    assert all(row.reason for row in rows)
    for file in known_files(PAGE_TEXT):
        own = [row for row in rows if row.file == file]
        (line,) = [
            line
            for line in PAGE_TEXT.splitlines()
            if line.startswith(f"| `{file}` |") and line.count("|") == 6 and line.split("|")[2].strip().isdigit()
        ]
        failures, with_numpy = (int(cell) for cell in line.split("|")[4:6])
        assert (failures, with_numpy) == (len(own), sum(row.as_numpy for row in own))


@pytest.mark.parametrize("row", ["| `a.py` | `T.t` | bug | fails | - |", "| `a.py` | `T.t` | fault | maybe | - |"])
def test_a_row_with_another_word_is_refused(row):
    header = "| test file | test | class | with NumPy | reason |\n| --- | --- | --- | --- | --- |\n"
    assert known_failures(header + "| `a.py` | `T.t` | fault | fails | - |") == [
        KnownFailure("a.py", "T.t", CLASSES[0], True, "-")
    ]
    with pytest.raises(ValueError, match=r"T\.t: '(bug|maybe)'"):
        known_failures(header + row)


@pytest.mark.all
def test_a_file_of_a_source_tree_runs_on_the_engine(tmp_path):
    folder = tmp_path / "tensorflow_federated" / "python" / "aggregators"
    folder.mkdir(parents=True)
    (folder / "only_in_the_tree.py").write_text('ENGINE = "NumpyEngine"\n')
    (folder / "mine_test.py").write_text(TEST_FILE)
    command = [
        sys.executable,
        "-m",
        "tools.tff_conformance",
        str(tmp_path),
        "--file",
        "python/aggregators/mine_test.py",
    ]
    with (tmp_path / "log").open("w+") as log:
        for values, status in (("numpy", 0), ("tensors", 1)):
            done = subprocess.run(
                [*command, "--values", values],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=170,
                check=False,
            )
            assert done.returncode == status
        log.seek(0)
        printed = log.read()
    assert "python/aggregators/mine_test.py: 3 tests: 2 passes, 0 fails, 1 is skipped" in printed
    assert "| python/aggregators/mine_test.py | SumTest.test_sum | fails, and is not listed |" in printed
