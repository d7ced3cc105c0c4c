"""The code of docs/add_an_algorithm.md: a method from an empty file to a passing contract and a trained experiment."""

import importlib
import re
import subprocess
import sys

import pytest
import yaml

from tests.places import DEMO, ROOT
from tff_pdp import testing
from tff_pdp.experiment.config import load_experiment
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.train import train

PAGE = ROOT / "docs" / "add_an_algorithm.md"
MODULES = ("blend", "test_blend", "blend_plugin")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def blend(tmp_path, monkeypatch):
    """The tutorial's files, in a folder on Python's path."""
    codes = blocks("python")
    assert len(codes) == len(MODULES)
    for name, code in zip(MODULES, codes, strict=True):
        assert f"`{name}.py`" in PAGE.read_text()
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.timeout(300)
def test_the_tests_of_the_page_pass(blend):
    tests = importlib.import_module("test_blend")
    for name in [name for name in vars(tests) if name.startswith("test_")]:
        vars(tests)[name]()


def test_the_contract_names_the_broken_rule_as_the_page_says(blend):
    code = (blend / "blend.py").read_text()
    assert "data_passes=1" in code
    (blend / "blend.py").write_text(code.replace("data_passes=1", "data_passes=2"))
    build = importlib.import_module("blend").build_blend
    with pytest.raises(AssertionError, match="each gradient that the ledger is charged for is asked for once"):
        testing.check_algorithm(build, local_steps=2)


def test_the_experiment_of_the_page_trains(blend, experiment):
    (text,) = blocks("yaml")
    given = yaml.safe_load(text)
    assert load_experiment(DEMO, {**given, "tuning": {}}).export.model_name == "digits"
    config = experiment(algorithms=given["algorithms"], export__algorithm="blend", training__rounds=2)
    train(config, "blend", progress=False)
    method, state = load_trained(config, "blend")
    assert (method.algorithm.title, state.round_number) == ("Blend", 2)
    assert "defined outside of tff_pdp (blend" in method.plan.claim_reason


@pytest.mark.all
@pytest.mark.timeout(900)
def test_the_whole_contract_runs_from_outside(blend):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "blend_plugin"]
    command += ["tests/contract/test_every_algorithm.py", "-k", "blend"]
    environment = {"PYTHONPATH": f"{ROOT}:{blend}", "PATH": "/usr/bin:/bin", "HOME": str(blend)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
