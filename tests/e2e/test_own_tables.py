"""Tables of many people become served answers with names of classes, by the commands of docs/own_data.md."""

import json
import re

import numpy as np
import pytest

from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import ROOT
from tff_pdp.cli import main

NAMES = ("cycling", "lying", "running", "sitting", "standing", "walking")
PEOPLE, ROWS, FEATURES = 30, 40, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The experiment of the page, with the files of thirty people whose activities are far apart."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "people").mkdir()
    generator = np.random.default_rng(0)
    centres = 4 * np.eye(len(NAMES))[:, :FEATURES]
    for person in range(PEOPLE):
        labels = generator.integers(0, len(NAMES), ROWS)
        x = centres[labels] + generator.normal(0, 0.3, (ROWS, FEATURES))
        lines = [",".join([NAMES[y], *(f"{value:.4f}" for value in row)]) for y, row in zip(labels, x, strict=True)]
        header = ",".join(["activity", *(f"f{place}" for place in range(FEATURES))])
        (folder / "people" / f"person_{person:02d}.csv").write_text("\n".join([header, *lines]) + "\n")
    page = (ROOT / "docs" / "own_data.md").read_text()
    found = re.search(r"```yaml\n(title: .*?)```", page, re.DOTALL)
    assert found
    (folder / "my.yaml").write_text(found[1])
    return folder


def test_the_experiment_of_the_page_is_short(folder):
    assert len((folder / "my.yaml").read_text().splitlines()) <= 25


@pytest.mark.timeout(300)
def test_three_commands_make_personal_models_that_answer_with_names(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    # Tracing both forms, to find out which of them is faster, takes most of the time.
    quick = ["--set", "training.rounds=4", "--client-parallelism", "loop"]
    for words in (["prepare"], ["train", *quick], ["export", "--set", "training.rounds=4"]):
        assert main([words[0], "--config", "my.yaml", *words[1:]]) == 0
    capsys.readouterr()
    base_path = folder / "runs" / "people" / "export" / "activities"
    card = json.loads((base_path / "1" / "assets.extra" / "model_card.json").read_text())
    assert card["class_names"] == list(NAMES)
    assert "constants that were taken from all clients' records" in card["claim_reason"]
    with EmbeddedServer([ServedModel("activities", base_path)]) as server:
        words = ["predict", "--config", "my.yaml", "--client-id", "person_03", "--address"]
        assert main([*words, f"localhost:{server.rest_port}", "--json"]) == 0
        answered = json.loads(capsys.readouterr().out)["predictions"]
    assert len(answered) == 3
    # Noise is drawn from a secret key, so that a short training may answer with any name.
    assert {row[key] for row in answered for key in ("label", "predicted")} <= set(NAMES)
    assert all(row["personalized"] for row in answered)
