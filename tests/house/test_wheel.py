"""The wheel has what its commands read, and they run outside of the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.places import CONFIGS, ROOT
from tff_pdp import __version__
from tff_pdp.experiment.config import load_experiment

PACKAGES = ("tff_pdp", "beam_pipelines", "serving")


def _run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Runs a command without what this process has in its environment of the checkout, and returns what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without network from a copy: building leaves files in its folder."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-index", "--no-cache-dir")
    _run(*pip, "--no-deps", "--no-build-isolation", "-w", folder, tree, cwd=folder)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory):
    """The folder of commands of an environment with the wheel, which sees the packages that this one has."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # Only what lies there: the finder of an editable installation is not run.
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python", "--disable-pip-version-check")
    _run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=place)
    return place / "bin"


def test_the_wheel_has_all_files_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"tff_pdp-{__version__}.dist-info/METADATA").decode()
    tracked = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.name != "BUILD"
    }
    assert held == tracked
    assert {"tff_pdp/configs/demo.yaml", "tff_pdp/requirements.txt", "tff_pdp/reports/report.html.jinja"} <= held
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in needed if "pytest" in line and "extra ==" not in line] == []


def test_commands_run_outside_of_the_checkout(commands, tmp_path):
    assert "tff-pdp COMMAND --help" in _run(commands / "tff-pdp", "--help", cwd=tmp_path)
    place = _run(commands / "python", "-c", "import tff_pdp; print(tff_pdp.__file__)", cwd=tmp_path)
    assert Path(place).is_relative_to(commands.parent)


def test_a_shipped_experiment_is_where_ones_own_begins(commands, tmp_path):
    own = _run(commands / "tff-pdp", "config", "--config", "demo", "--set", "training.rounds=7", cwd=tmp_path)
    (tmp_path / "my.yaml").write_text(own)
    assert load_experiment(tmp_path / "my.yaml") == load_experiment(CONFIGS / "demo.yaml", {"training.rounds": 7})


def test_a_published_experiment_asks_for_its_data(commands, tmp_path):
    names = {path.stem for path in (CONFIGS / "reproduce").glob("*.yaml")}
    help_text = " ".join(_run(commands / "tff-pdp", "reproduce", "--help", cwd=tmp_path).split())
    assert [name for name in names if name not in help_text] == []
    _run(commands / "tff-pdp", "reproduce", "school", "--data", ".", cwd=tmp_path, status=2)
    assert not list(tmp_path.iterdir())
