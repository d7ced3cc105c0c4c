"""The page and the schema of configurations: made of the classes that read them, and as the shipped files are."""

import json
import re

import pytest

from tests.places import CONFIGS, ROOT
from tff_pdp import load_experiment
from tff_pdp.cli import main
from tff_pdp.experiment import reference
from tff_pdp.experiment.kinds import ALGORITHMS, MODELS, PLANS, SOURCES
from tff_pdp.settings import read_yaml


def test_the_page_is_what_the_classes_say():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.reference(), (
        "write it again: tff-pdp config --reference > docs/configuration.md"
    )


def test_every_key_has_a_meaning():
    rows = [line.split(" | ") for line in reference.reference().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if len(row) != 4] == []
    assert [row[0] for row in rows if row[3].strip(" |.") == ""] == []


@pytest.fixture(scope="module")
def schema():
    return reference.schema()


def resolve(schema, part):
    while "$ref" in part:
        part = schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
    return part


def faults(schema, part, value, place="$"):
    """What of a value is against a part of a schema: the few words of JSON Schema that ours has."""
    part = resolve(schema, part)
    if "anyOf" in part:
        found = [faults(schema, one, value, place) for one in part["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "const" in part:
        return [] if value == part["const"] else [f"{place}: not {part['const']}"]
    if "enum" in part:
        return [] if value in part["enum"] else [f"{place}: not one of {part['enum']}"]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kinds |= {"number": (int, float), "integer": int}
    if "type" in part and (
        not isinstance(value, kinds[part["type"]]) or (isinstance(value, bool) != (part["type"] == "boolean"))
    ):
        return [f"{place}: not of type {part['type']}"]
    found = []
    if isinstance(value, dict):
        known = part.get("properties", {})
        others = part.get("additionalProperties", True)
        found += [f"{place}: lacks {name}" for name in part.get("required", []) if name not in value]
        for name, inner in value.items():
            if name in known:
                found += faults(schema, known[name], inner, f"{place}.{name}")
            elif others is False:
                found.append(f"{place}: unknown {name}")
            elif isinstance(others, dict):
                found += faults(schema, others, inner, f"{place}.{name}")
    if isinstance(value, list):
        for inner in value:
            found += faults(schema, part.get("items", {}), inner, f"{place}[]")
    if isinstance(value, str) and not re.search(part.get("pattern", ""), value):
        found.append(f"{place}: not like {part['pattern']}")
    if isinstance(value, int | float) and "minimum" in part and value < part["minimum"]:
        found.append(f"{place}: below {part['minimum']}")
    if isinstance(value, int | float) and "exclusiveMinimum" in part and value <= part["exclusiveMinimum"]:
        found.append(f"{place}: not above {part['exclusiveMinimum']}")
    return found


def as_read(path):
    """As an editor sees the file: a method's kind may be its name."""
    content = json.loads(json.dumps(read_yaml(path)))
    for name, settings in content["algorithms"].items():
        settings.setdefault("kind", name)
    return content


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.yaml")) + sorted((CONFIGS / "reproduce").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configurations_are_as_the_schema_says(schema, path):
    assert faults(schema, schema, as_read(path)) == []


def test_the_experiment_of_the_page_on_synthetic_data_can_be_loaded(schema, tmp_path):
    page, path = (ROOT / "docs" / "synthetic_data.md").read_text(), tmp_path / "my.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert faults(schema, schema, as_read(path)) == []
    config = load_experiment(path)
    assert 0 < config.privacy.synthetic.rounds < config.training.rounds


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("privacy", "clip_norm", -1),
        ("privacy", "clipnorm", 1),
        ("privacy", "kind", "silo"),
        ("training", "rounds", 0),
        ("data", "input_shape", "28"),
        ("model", "kind", 3),
    ],
)
def test_the_schema_refuses(schema, section, key, value):
    content = as_read(CONFIGS / "demo.yaml")
    content[section][key] = value
    assert faults(schema, schema, content)


def test_the_schema_has_every_kind(schema):
    kinds = {name.split(".")[1] for name in schema["$defs"] if name.count(".") == 2}
    assert kinds >= {*SOURCES.own, *MODELS.own, *PLANS.own, *ALGORITHMS.own}


def test_the_command_shows_an_experiment_with_its_defaults_and_refuses_what_training_would(capsys):
    assert main(["config", "--config", str(CONFIGS / "demo.yaml"), "--set", "training.rounds=7"]) == 0
    shown = capsys.readouterr().out
    assert "rounds: 7" in shown and "evaluate_every: 5" in shown
    assert main(["config", "--config", str(CONFIGS / "demo.yaml"), "--set", "algorithms.mr_mtl.prox_wait=1"]) == 2
    assert "unknown key algorithms.mr_mtl.prox_wait; did you mean prox_weight?" in capsys.readouterr().err
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].startswith("https://json-schema.org")
