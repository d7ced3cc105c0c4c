"""The lint rule of `pyproject.toml`: what protects someone is drawn by the samplers, and by nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

ROOMS = ("privacy", "privacy/mechanisms", "privacy/plans", "processes", "training", "training/search", "experiment")
ROOMS += (
    "engines",
    "engines/inprocess",
    "personal_models",
    "personal_models/new_clients",
    "algorithms",
    "models",
    "data",
)
DRAWS = {
    "generator": "import numpy as np\n\ndrawn = np.random.default_rng(0).normal()\n",
    "legacy": "import numpy\n\ndrawn = numpy.random.normal()\n",
    "imported": "from numpy.random import default_rng\n\ndrawn = default_rng(0).laplace()\n",
    "renamed": "from numpy import random as other\n\ndrawn = other.permutation(3)\n",
    "annotated": "import numpy as np\n\n\ndef draw(generator: np.random.Generator):\n    return generator.normal()\n",
    "late": "def draw():\n    import numpy.random as other\n\n    return other.rand()\n",
    "standard library": "import random\n\ndrawn = random.gauss(0, 1)\n",
    "secrets": "import secrets\n\ndrawn = secrets.randbelow(3)\n",
    "graph": "import tensorflow as tf\n\ndrawn = tf.random.stateless_normal([1], [1, 2])\n",
    "graph's generator": "import tensorflow as tf\n\ndrawn = tf.random.Generator.from_seed(1).normal([1])\n",
    "raw": "import tensorflow as tf\n\ndrawn = tf.raw_ops.RandomStandardNormal(shape=[1], dtype=tf.float32)\n",
    "first TensorFlow": "import tensorflow as tf\n\ndrawn = tf.compat.v1.random_normal([1])\n",
    "dropout": "import tensorflow as tf\n\ndrawn = tf.nn.dropout([1.0], 0.5)\n",
}


def _refused(tree: Path) -> dict[str, set[int]]:
    """Returns by file the lines that `make lint` refuses for a draw."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--select",
        "TID251",
        "--output-format",
        "json",
        ".",
    ]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, set[int]] = {}
    for one in json.loads(done.stdout):
        path = Path(one["filename"]).resolve().relative_to(tree.resolve()).as_posix()
        found.setdefault(path, set()).add(one["location"]["row"])
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and of the rules."""
    shutil.copytree(ROOT / "tff_pdp", tmp_path / "tff_pdp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_no_draw_goes_past_the_samplers(tree: Path) -> None:
    assert _refused(tree) == {}


def test_every_planted_draw_is_refused_in_every_room(tree: Path) -> None:
    planted = {
        f"tff_pdp/{room}/planted_{number}.py": text for room in ROOMS for number, text in enumerate(DRAWS.values())
    }
    for path, text in planted.items():
        (tree / path).write_text(text)
    found = _refused(tree)
    assert [path for path in planted if path not in found] == []
    assert set(found) == set(planted)


def test_a_draw_in_a_module_that_has_none_is_refused(tree: Path) -> None:
    path = tree / "tff_pdp" / "privacy" / "mechanisms" / "silo_statistics.py"
    lines = len(path.read_text().splitlines())
    with path.open("a") as file:
        file.write("\n\ndef planted():\n    return np.random.default_rng(0)\n")
    assert _refused(tree) == {"tff_pdp/privacy/mechanisms/silo_statistics.py": {lines + 4}}


def test_the_rule_is_one_of_make_lint_and_is_switched_off_nowhere_in_the_code() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-settings", str(ROOT / "tff_pdp" / "errors.py")]
    settings = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "banned-api (TID251)" in settings
    assert not [path for path in (ROOT / "tff_pdp").rglob("*.py") if "TID251" in path.read_text()]
