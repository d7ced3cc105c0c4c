"""The layers of `pyproject.toml`: imports go down, and no files import each other in a circle."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

PACKAGES = ("tff_pdp", "beam_pipelines", "serving")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the three packages and of the layers."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _check(tree: Path) -> str:
    """Returns the complaints of `make lint` about layers on one line, nothing where it has none."""
    program = (
        "import sys; from importlinter.cli import lint_imports as lint; sys.exit(lint(no_cache=True, no_logo=True))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return "" if done.returncode == 0 else " ".join(done.stdout.split())


def _plant(tree: Path, importer: str, imported: str) -> None:
    # Inside a function: an import that runs late is an import all the same.
    with (tree / importer.replace(".", "/")).with_suffix(".py").open("a") as file:
        file.write(f"\n\ndef planted():\n    import {imported}\n")


def test_imports_go_down(tree: Path) -> None:
    assert _check(tree) == ""


def test_every_planted_import_is_found(tree: Path) -> None:
    planted = {
        "tff_pdp.models.base": "tff_pdp.processes.compose",
        "tff_pdp.algorithms.base": "tff_pdp.algorithms.whole_models.fed_avg",
        "tff_pdp.algorithms.shared_parts.centaur": "tff_pdp.algorithms.whole_models.mocha",
        "tff_pdp.engines.base": "beam_pipelines.options",
        "beam_pipelines.rules": "tff_pdp.models.layers",
        "serving.export.exporter": "beam_pipelines.records",
        "serving.client.answers": "tff_pdp.data.manifest",
    }
    for importer, imported in planted.items():
        _plant(tree, importer, imported)
    told = _check(tree)
    assert [importer for importer, imported in planted.items() if f"{importer} -> {imported}" not in told] == []


def test_a_circle_of_files_is_found(tree: Path) -> None:
    _plant(tree, "tff_pdp.training.checkpoint", "tff_pdp.training.train")
    assert "No circle of files BROKEN" in _check(tree)


def test_a_module_without_a_layer_is_found(tree: Path) -> None:
    (tree / "tff_pdp" / "extra.py").touch()
    assert "tff_pdp.extra" in _check(tree)
