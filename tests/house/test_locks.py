"""Locks pin what pyproject.toml names, each package once and by hashes; known vulnerabilities are dealt with."""

import re
import tomllib
from importlib import metadata

import pytest

from tests.places import ROOT
from tools import audit_deps

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME, DEVELOPMENT, GPU, MLFLOW = (lock.read_text() for lock in audit_deps.LOCKS)


def _names(requirements: list[str]) -> set[str]:
    return {re.split("[=<>]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def test_the_lock_in_the_wheel_has_what_the_product_needs():
    assert _names(PROJECT["dependencies"]) <= set(audit_deps.read_pins(RUNTIME))


def test_both_locks_together_have_what_development_needs():
    assert _names(PROJECT["optional-dependencies"]["dev"]) <= set(audit_deps.read_pins(RUNTIME, DEVELOPMENT))


def test_no_gate_is_installed_with_the_product():
    gates = {"basedpyright", "hypothesis", "import-linter", "polars", "prv-accountant", "pytest", "ruff", "uv"}
    assert gates <= set(audit_deps.read_pins(DEVELOPMENT))
    assert not set(audit_deps.read_pins(RUNTIME)) & set(audit_deps.read_pins(DEVELOPMENT))


def test_the_lock_of_cuda_has_the_versions_that_tensorflow_asks_for():
    named = {name: version for name, version in _required_by_tensorflow() if name.startswith("nvidia-")}
    pins = audit_deps.read_pins(GPU)
    assert pins == {name: named[name] for name in pins}
    # All but cuRAND, which TensorFlow does not open, and NCCL, which no code here calls.
    assert set(named) - set(pins) == {"nvidia-curand-cu11", "nvidia-nccl-cu11"}
    assert set(pins) == _names(PROJECT["optional-dependencies"]["gpu"])
    assert not set(pins) & set(audit_deps.read_pins(RUNTIME, DEVELOPMENT))


def test_the_lock_of_mlflow_has_what_the_lock_in_the_wheel_lacks():
    pins = set(audit_deps.read_pins(MLFLOW))
    assert _names(PROJECT["optional-dependencies"]["mlflow"]) <= pins
    assert not pins & set(audit_deps.read_pins(RUNTIME))


def _required_by_tensorflow() -> list[tuple[str, str]]:
    return re.findall(r"^(\S+) \(==(\S+)\) ;", "\n".join(metadata.requires("tensorflow") or ()), re.MULTILINE)


@pytest.mark.parametrize("lock", [RUNTIME, DEVELOPMENT, GPU, MLFLOW], ids=["runtime", "development", "gpu", "mlflow"])
def test_every_pin_has_a_hash(lock):
    pins = re.split(r"\n(?! )", lock.strip())
    assert [
        pin.partition(" ")[0] for pin in pins if not re.match(r"\S+==\S+ \\\n +--hash=sha256:[0-9a-f]{64}", pin)
    ] == []


def test_known_vulnerabilities_of_pins_are_dealt_with(capsys):
    assert audit_deps.main() == 0, capsys.readouterr().out
    assert re.search(r"last looked at on \d{4}-\d\d-\d\d$", capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("pin", "entry", "source", "is_well"),
    [
        ("1.9", {"affected": "<1.9"}, "", True),
        ("1.8.9", {"affected": "<1.9"}, "", False),
        ("1.9rc1", {"affected": "<1.9"}, "", True),
        ("2.4", {"affected": ["<1.9", ">=2,<2.5"]}, "", False),
        ("1.8", {"affected": "<1.9", "done": "nobody calls f", "absent": r"f\("}, "g()", True),
        ("1.8", {"affected": "<1.9", "done": "nobody calls f", "absent": r"f\("}, "f()", False),
        (None, {"affected": "<1.9"}, "", False),
    ],
)
def test_an_affected_pin_is_a_problem_unless_something_is_done(pin, entry, source, is_well):
    known = {"a": {"use": "-", "known": [{"id": "CVE-0", "what": "-", **entry}]}}
    ((found, _),) = audit_deps.findings(known, {"a": pin} if pin else {}, [source])
    assert found is is_well
