"""Every file that a run leaves: where an object's claim is none, no finite epsilon stands in it."""

import ast
import inspect
import json
import math
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import tff_pdp
from tests.tiers import parameters
from tff_pdp.algorithms.shared_parts.dp_pfed_dsu import MaskSource
from tff_pdp.experiment.config import Training
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.privacy.mechanisms.feature_scaling import Scalings
from tff_pdp.privacy.mechanisms.parameters import Sampler
from tff_pdp.privacy.plans.silo_noise import CALIBRATIONS
from tff_pdp.training.evaluate import evaluate_experiment, summary_table
from tff_pdp.training.train import train

PAPER = "paper_"
USERS = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": 1.5,
    "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
}
NO_USERS = {"kind": "none", "unit": "user", "batch_size": 16, "users_per_round": 1.5}
ONE_USER_METHOD = {"algorithms": {"fed_avg": {}}, "privacy": USERS}
# What the two kinds of clients run under where a variant says nothing else.
SILOS = {"algorithms": {"fed_avg": {}}}
# Methods whose clients are users.
OF_USERS = ("udp_hypernet", "dp_pfed_dsu")
# Kinds of feature scalings.
SCALINGS = [scaling.__struct_config__.tag for scaling in get_args(Scalings)]


def papers(names):
    return [name for name in names if name.startswith(PAPER)]


def paper_settings():
    """Overrides of an experiment by variant, as the code's own lists of settings name these."""
    found = {name: {**SILOS, "privacy__sampler": name} for name in papers(get_args(Sampler))}
    found |= {name: {**SILOS, "privacy__noise_calibration": name} for name in papers(CALIBRATIONS)}
    found |= {name: {**SILOS, "privacy__feature_scaling": {"kind": name}} for name in papers(SCALINGS)}
    weightings = get_args(get_type_hints(Training)["weighting"])
    found |= {name: {**ONE_USER_METHOD, "training__weighting": name} for name in papers(weightings)}
    found |= {name: method("dp_pfed_dsu", mask_source=name) for name in papers(get_args(MaskSource))}
    for algorithm in ALGORITHMS.own:
        settings = inspect.signature(ALGORITHMS.find(algorithm)).parameters
        found |= {name: method(algorithm, **{name: True}) for name in papers(settings)}
    return found


def method(name, **settings):
    return {"algorithms": {name: settings}, **({"privacy": USERS} if name in OF_USERS else {})}


OTHERS = {
    "plan none": {**SILOS, "privacy__kind": "none"},
    "plan none of users": {**ONE_USER_METHOD, "privacy": NO_USERS},
    "test_only_seed": {**SILOS, "training__test_only_seed": 1},
    "test_only_seed of users": {**ONE_USER_METHOD, "training__test_only_seed": 1},
    "a silo without noise": {
        **SILOS,
        "privacy__budgets": {"kind": "by_silo", "delta": 1e-4, "default_epsilon": 4.0, "silos": {"silo_01": math.inf}},
    },
}
VARIANTS = {**paper_settings(), **OTHERS}
# Of these the guarantee holds, at most under a condition.
WITH_A_CLAIM = {
    "paper_rdp",
    "paper_asymptotic",
    "paper_covariance",
    "paper_raw_norms",
    "paper_server_descriptors",
    "paper_capped_num_examples",
}


def test_no_variant_is_missing():
    """Every word that begins like one, in the code of methods, plans and settings, is in the lists above."""
    folder = Path(tff_pdp.__file__).parent
    words = set()
    for room in ("algorithms", "experiment", "privacy", "processes"):
        for path in (folder / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                    words.add(node.value)
                if isinstance(node, ast.arg):
                    words.add(node.arg)
    assert set(papers(words)) == set(paper_settings())


def finite_epsilons(content, claim="", path=""):
    """Where a finite epsilon that was spent or is promised stands under an object whose own claim is none."""
    if isinstance(content, list):
        for place, entry in enumerate(content):
            yield from finite_epsilons(entry, claim, f"{path}[{place}]")
    if not isinstance(content, dict):
        return
    claim = content.get("claim", claim)
    for key, entry in content.items():
        # What was asked for stays.
        is_spent = "epsilon" in key and not key.endswith("target")
        if claim == "none" and is_spent and isinstance(entry, int | float):
            yield f"{path}.{key} = {entry}"
        yield from finite_epsilons(entry, claim, f"{path}.{key}")


def objects(content):
    if isinstance(content, dict):
        yield content
    for entry in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from objects(entry)


@pytest.mark.usefixtures("one_fresh_process")
@pytest.mark.parametrize("name", parameters(VARIANTS, test=["paper_shuffled", "test_only_seed of users", "plan none"]))
def test_no_file_has_an_epsilon_that_no_claim_covers(experiment, name):
    settings = {"training__rounds": 2, "training__test_only_seed": None, "tuning": {}, **VARIANTS[name]}
    (algorithm,) = settings["algorithms"]
    if algorithm in OF_USERS:
        settings["model"] = {"kind": "mlp", "hidden_units": [4]}
    config = experiment(**settings, export__algorithm=algorithm)
    train(config, algorithm, progress=False)
    summary = evaluate_experiment(config)
    export_experiment(config)
    files = [path for path in Path(config.output).rglob("*.json") if config.clients_folder not in path.parents]
    contents = {path.name: json.loads(path.read_text()) for path in files}
    assert contents.keys() >= {"summary.json", "privacy_report.json", "model_card.json"}
    assert [where for file, content in contents.items() for where in finite_epsilons(content, path=file)] == []
    assert all(one["claim_reason"] for content in contents.values() for one in objects(content) if "claim" in one)
    claims = {contents[file]["claim"] for file in ("privacy_report.json", "model_card.json")}
    claims |= {contents["summary.json"]["privacy"]["claim"], contents["summary.json"]["algorithms"][algorithm]["claim"]}
    claims.add(contents["summary.json"]["privacy"]["composed"]["claim"])
    is_none = name not in WITH_A_CLAIM
    assert claims == {"none"} if is_none else "none" not in claims and len(claims) == 1
    said = summary_table(summary).splitlines()
    assert any("claim: none, and no epsilon" in line for line in said) == is_none
    page = (Path(config.output) / "report.html").read_text()
    assert ("no ε holds" in page, "Most ε spent" in page or "ε of every user" in page) == (is_none, not is_none)


def test_the_walk_finds_what_it_looks_for():
    inner = {"claim": "formal", "epsilon": 1.0}
    report = {"claim": "none", "epsilon": 2.0, "epsilon_target": 4.0, "silos": [inner, {"epsilon_spent": 3.0}]}
    assert list(finite_epsilons(report)) == [".epsilon = 2.0", ".silos[1].epsilon_spent = 3.0"]
