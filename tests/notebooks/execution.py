"""Executes a notebook in a kernel of its own, as Jupyter does.

`python -m tests.notebooks.execution` executes all notebooks and writes their outputs, without progress and warnings.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Seconds that one cell may take.
TIMEOUT = 240


def execute(notebook: Path, folder: Path) -> Any:
    """Executes a notebook in a folder, in which it writes its files; raises CellExecutionError if a cell fails."""
    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        content, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with _environment(folder):
        client.execute()
    return content


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Lets the kernel import this checkout, and keeps its runs out of the registry of the machine."""
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XDG_STATE_HOME": str(folder / "state"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def refresh(notebook: Path) -> None:
    """Executes a notebook and writes its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        content = execute(notebook, Path(folder))
    for cell in content.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # Neither progress nor what packages display as they are imported.
            cell.outputs = [
                one for one in cell.outputs if one.output_type == "execute_result" or one.get("name") == "stdout"
            ]
    content.metadata.pop("widgets", None)
    nbformat.write(content, notebook)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        print(path.name, flush=True)
        refresh(path)
