"""Notebooks run as they stand, and are small."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.notebooks.execution import NOTEBOOKS, execute

# Bytes of a notebook with its outputs.
MOST_BYTES = 50_000


def test_there_are_notebooks_of_silos_users_and_a_contact_graph():
    assert [notebook.stem for notebook in NOTEBOOKS] == ["contact_graph", "silos_from_csv", "users"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_small_and_shows_what_it_computes(notebook):
    assert notebook.stat().st_size <= MOST_BYTES
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"execute_result", "stream"}, "an error or a picture"


@pytest.mark.all
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook, tmp_path):
    execute(notebook, tmp_path)


def test_a_cell_that_fails_is_a_failure(tmp_path):
    faulty = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(faulty, tmp_path / "faulty.ipynb")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(tmp_path / "faulty.ipynb", tmp_path)
