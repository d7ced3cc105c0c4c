"""`import tff_pdp`: a small interface that is imported when it is used, and that type checkers see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tff_pdp
from tff_pdp.errors import UserError

HEAVY = ("apache_beam", "dp_accounting", "matplotlib", "numpy", "scipy", "tensorflow", "tensorflow_federated")
STUB = Path(tff_pdp.__file__).with_suffix(".pyi")


def _heavy_after(code: str) -> list[str]:
    program = f"import sys; {code}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_to_import_the_package_imports_nothing_else():
    assert _heavy_after("import tff_pdp; dir(tff_pdp); assert 'yaml' not in sys.modules") == []


def test_an_experiment_is_read_without_tensorflow():
    found = _heavy_after("import tff_pdp; tff_pdp.load_experiment('demo')")
    assert [name for name in found if name.startswith("tensorflow")] == []


def test_a_name_is_what_the_stub_says():
    tree = ast.parse(STUB.read_text())
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (stated,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    assert sorted(imported) == sorted(stated) == sorted(tff_pdp.__all__)
    for name, (module, own) in imported.items():
        assert getattr(tff_pdp, name) is getattr(sys.modules[module], own)
        assert getattr(tff_pdp, name).__doc__
    assert set(stated) <= set(dir(tff_pdp))


@pytest.mark.parametrize("name", tff_pdp.__all__)
def test_every_name_has_an_example(name):
    found = getattr(tff_pdp, name)
    assert ">>> " in found.__doc__
    if name == "Experiment":
        own = {attribute: one for attribute, one in vars(found).items() if not attribute.startswith("_")}
        assert len(own) == 11
        # The example of the class makes an experiment; the others go on from there.
        assert [attribute for attribute, one in own.items() if ">>> " not in (one.__doc__ or "")] == []


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        getattr(tff_pdp, "gone")  # noqa: B009 - a checker knows that there is none
    assert tff_pdp.UserError is UserError
