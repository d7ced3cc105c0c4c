"""Contact graphs from end to end, at the small scale: a made-up population, and measured contacts if there are some."""

import contextlib
import math
import os
from pathlib import Path

import numpy as np
import pytest

import beam_pipelines
from tests.reproduce.reproduce_support import build_reproduction
from tests.reproduce.settings_support import setting_changed
from tests.tiers import parameters
from tff_pdp.cli import main
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import DataError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.reproduce.inputs import INPUTS, digest_of_data, find_input
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.run import JobRunner
from tff_pdp.reproduce.setting import read_setting

PANDEMIC, NETWORKS = read_setting("pandemic"), read_setting("contact_networks")
MADE_UP = INPUTS["made_up"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def pandemic(tmp_path_factory):
    with setting_changed("pandemic"):
        yield build_reproduction(
            tmp_path_factory.mktemp("pandemic"),
            setting_name="pandemic",
            scale_name="small",
            variant_names=("default", "no_contacts", "edge"),
            data_input=find_input(MADE_UP, None),
            data_digest="made up",
        )


@pytest.fixture(scope="module")
def run_pandemic(pandemic):
    with contextlib.closing(JobRunner(pandemic)) as runner:
        yield lambda variant, epsilon: runner(Job(variant, "fed_avg", epsilon, 0)).row


def test_contacts_tell_who_falls_ill(pandemic, run_pandemic):
    known, private, alone = (
        run_pandemic(variant, epsilon)
        for variant, epsilon in (("default", math.inf), ("default", 8.0), ("no_contacts", math.inf))
    )
    labels = labels_of(pandemic, "default")
    assert len(labels) == 4000 and 20 < labels.sum() < 400
    assert known["prevalence"] == private["prevalence"] == alone["prevalence"] == pytest.approx(labels.mean())
    for figure in ("value", "pooled_average_precision"):
        assert known[figure] > 3 * alone[figure] > 3 * labels.mean()
        assert private[figure] > 2 * labels.mean()
    assert known["epsilon_spent"] is private["epsilon_spent"] is None
    assert known["with_secret_key"]["epsilon"] is None
    # The noise of an epsilon is the least that keeps it.
    assert 7.9 < private["with_secret_key"]["epsilon"] <= 8.0


@pytest.mark.parametrize(
    ("variant", "unit", "num_rows"),
    parameters(
        [("default", "node", 11), ("no_contacts", "node", 1), ("edge", "edge", 2)], test=[("default", "node", 11)]
    ),
)
def test_how_many_rows_a_variant_protects(pandemic, run_pandemic, variant, unit, num_rows):
    row = run_pandemic(variant, 8.0)
    influence = dataset(pandemic, variant).manifest.row_influence
    assert (influence.unit, influence.num_rows) == (unit, num_rows)
    assert 7.9 < row["with_secret_key"]["epsilon"] <= 8.0


def test_made_up_data_need_no_folder(monkeypatch):
    monkeypatch.delenv("TFF_PDP_DATA", raising=False)
    made_up = find_input(MADE_UP, None)
    assert str(made_up) == "generated" and find_input(MADE_UP, "no/such/folder") == made_up
    before = digest_of_data(MADE_UP, made_up)
    assert before == digest_of_data(MADE_UP, made_up)
    # Other modules make other data.
    monkeypatch.setattr(beam_pipelines, "__file__", __file__)
    assert digest_of_data(MADE_UP, made_up) != before
    with pytest.raises(DataError, match="contains contacts"):
        find_input(INPUTS["contacts"], None)


def test_the_command_lists_both(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    assert {"pandemic", "contact_networks"} <= set(capsys.readouterr().out.replace(",", " ").replace("{", " ").split())


def test_networks_have_a_baseline_each():
    names = [variant.name for variant in NETWORKS.variants]
    assert names[1::2] == [f"{name}_no_contacts" for name in names[::2]]


def test_measured_contacts(tmp_path, real_contacts):
    """Without contacts in rows, nothing about contacts can leak, and no noise is needed at all."""
    measured = build_reproduction(
        tmp_path,
        setting_name="contact_networks",
        scale_name="small",
        variant_names=("hospital", "hospital_no_contacts"),
        data_input=real_contacts,
        data_digest="contacts",
    )
    with contextlib.closing(JobRunner(measured)) as runner:
        row = runner(Job("hospital", "fed_avg", 8.0, 0)).row
    labels = labels_of(measured, "hospital")
    assert len(labels) == 75 and row["prevalence"] == pytest.approx(labels.mean())
    assert 7.9 < row["with_secret_key"]["epsilon"] <= 8.0 and 0 < row["value"] <= 1
    alone = measured.config(Job("hospital_no_contacts", "fed_avg", 8.0, 0))
    prepare_clients(alone)
    assert build_method(alone, "fed_avg").plan.planned_epsilon() == 0.0
    # Two people, in five windows.
    assert dataset(measured, "hospital").manifest.row_influence.num_rows == 10


@pytest.fixture
def real_contacts():
    root = os.environ.get("TFF_PDP_DATA")
    if not root or not (Path(root) / "contacts" / "hospital").is_dir():
        pytest.skip("TFF_PDP_DATA is not set, or has no contacts/hospital: no measured contacts")
    return Path(root).absolute() / "contacts"


def dataset(reproduction, variant):
    return ClientDataset.open(reproduction.config(Job(variant, "fed_avg", 8.0, 0)).clients_folder)


def labels_of(reproduction, variant):
    clients = dataset(reproduction, variant)
    return np.concatenate([clients.load(client_id, "test").y for client_id in clients.client_ids])
