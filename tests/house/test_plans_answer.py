"""Plans answer; nobody outside of their room asks which plan there is."""

import ast
from pathlib import Path

import pytest

from tests.places import ROOT

ROOM = ROOT / "tff_pdp" / "privacy" / "plans"


def _classes_of_plans() -> set[str]:
    """Names of the classes of plans and of their settings, which inherit from these two."""
    known = {"PlanSettings", "PrivacyPlan"}
    classes = [
        (node.name, {base.id for base in node.bases if isinstance(base, ast.Name)})
        for file in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in classes:
        known |= {name for name, bases in classes if bases & known}
    return known


PLANS = _classes_of_plans()


def _questions(text: str) -> list[int]:
    """Lines that ask whether something is of a class of plans, or compare the name of a plan's kind."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, asked]):
                names = {one.id for one in ast.walk(asked) if isinstance(one, ast.Name)}
                names |= {one.attr for one in ast.walk(asked) if isinstance(one, ast.Attribute)}
            case ast.MatchClass(cls=ast.Name(id=name) | ast.Attribute(attr=name)):
                names = {name}
            case ast.Compare(left=left, comparators=others):
                sides = [ast.unparse(side) for side in (left, *others)]
                names = PLANS if any(side.endswith("privacy.kind") for side in sides) else set()
            case _:
                continue
        if names & PLANS:
            lines.append(node.lineno)
    return lines


def _modules() -> list[Path]:
    tops = ("tff_pdp", "beam_pipelines", "serving", "benchmarks")
    return [file for top in tops for file in sorted((ROOT / top).rglob("*.py")) if ROOM not in file.parents]


def test_no_module_asks() -> None:
    found = {file.relative_to(ROOT).as_posix(): lines for file in _modules() if (lines := _questions(file.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "question",
    [
        "isinstance(plan, UserPlan)",
        "isinstance(settings, (str, plans.SiloExample))",
        "isinstance(plan, UserPlan | int)",
        "config.privacy.kind == 'user'",
        "match plan:\n    case SiloExamplePlan():\n        pass",
    ],
)
def test_a_question_is_found(question: str) -> None:
    assert {"SiloExample", "SiloExamplePlan", "UserPlan", "ContactGraphPlan", "Unprotected"} <= PLANS
    assert _questions(question) == [2 if question.startswith("match") else 1]
