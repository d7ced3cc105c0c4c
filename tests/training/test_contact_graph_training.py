"""Training under node-level DP on a data set whose manifest says in how many rows a person is."""

import dataclasses
import shutil

import dp_accounting
import pytest

from tff_pdp.data.manifest import Manifest, RowInfluence, mark_finished
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.before_training import RELEASES_FILE
from tff_pdp.experiment.build import build_method
from tff_pdp.personal_models.export import _privacy_report
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds
from tff_pdp.privacy.accounting.row_influence import PoissonRowsDpEvent, poisson_rows_event
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.train import train

NODE = RowInfluence("node", "replace_special", 4, "nobody has more than 3 contacts")
EDGE = RowInfluence("edge", "add_or_remove_one", 2, "a pair's contacts are in the two people's rows")
ALGORITHMS = {
    "mr_mtl": {"learning_rate": 0.3, "local_steps": 2, "prox_weight": 1.0},
    "ditto": {"learning_rate": 0.3, "local_steps": 2, "prox_weight": 1.0},
}


@pytest.fixture
def of_contacts(experiment, client_folder, tmp_path):
    """A function that builds an experiment on silos whose examples are said to be rows of a contact graph."""

    def build(row_influence=NODE, **overrides):
        output = tmp_path / "of_contacts"
        if not output.exists():
            shutil.copytree(client_folder, output / "clients")
            manifest = Manifest.load(client_folder)
            dataclasses.replace(manifest, row_influence=row_influence).save(output / "clients")
            mark_finished(output / "clients")
        settings = {
            "privacy__kind": "contact_graph",
            "algorithms": ALGORITHMS,
            "export__algorithm": "mr_mtl",
            "training__test_only_seed": None,
            "tuning": {},
        }
        return experiment(name="of_contacts", **{**settings, **overrides})

    return build


def test_training_spends_each_silos_budget_on_people(of_contacts):
    config = of_contacts()
    state = train(config, "mr_mtl", progress=False)
    method, stored = load_trained(config, "mr_mtl")
    assert stored.ledger.to_json() == state.ledger.to_json()
    assert (stored.ledger.unit, stored.ledger.adjacency) == ("node", Adjacency.REPLACE_SPECIAL)
    for client_id, mechanism in method.plan.mechanisms.items():
        _, entry = [entry for entry in stored.ledger.entries if entry.scope == client_id]
        assert entry.event == PoissonRowsDpEvent(mechanism.noise_multiplier, mechanism.sampling_rate, 4)
        assert entry.count == 6 * 2
        budget = method.plan.budgets[client_id]
        assert 0.98 * budget.epsilon < stored.ledger.epsilon(client_id).best <= budget.epsilon
    summary = evaluate_experiment(config, ["mr_mtl"])
    assert (summary["privacy"]["unit"], summary["privacy"]["claim"]) == ("node", "formal-conditional")
    for silo in summary["silos"]:
        event = poisson_rows_event(silo["sampling_rate"], silo["noise_multiplier"], 4, 12)
        drawn = next(iter(method.plan.drawn_noise.values()))
        both = dp_accounting.ComposedDpEvent([event, drawn])
        alone = epsilon_bounds(both, silo["delta"], Adjacency.REPLACE_SPECIAL).best
        # To the bit, of the same events.
        assert silo["epsilon_spent"] == alone
    page = (config.algorithm_folder("mr_mtl").parent / "report.html").read_text()
    assert "one person of one silo&#39;s contact graph (node)" in page and NODE.rule in page
    exported = _privacy_report(config, method, stored)
    assert (exported["unit"], exported["adjacency"]) == ("node", "replace_special")
    assert "at most 4 rows differ" in exported["claim_reason"]


def test_two_passes_over_the_rows_are_charged_twice(of_contacts):
    plan = build_method(of_contacts(), "ditto").plan
    ledger = plan.build_ledger()
    plan.charge_round(ledger, 1)
    assert {entry.count for entry in ledger.entries if entry.reason != DRAWN_NOISE} == {2 * 2}


def test_the_number_of_rows_comes_from_the_data_set_alone(of_contacts):
    config = of_contacts(EDGE)
    method = build_method(config, "mr_mtl")
    assert method.plan.unit == "edge"
    assert {method.plan.gradient_event(client_id).num_changed_rows for client_id in method.plan.mechanisms} == {2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"privacy__kind": "silo_example"}, r"one node is in up to 4 of them.*Set privacy.kind to contact_graph"),
        (
            {
                "privacy__kind": "user",
                "privacy__users_per_round": 2,
                "privacy__budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
            },
            r"privacy.kind user.*Set privacy.kind to contact_graph",
        ),
        ({"privacy__num_examples": {"kind": "noised", "epsilon": 0.1}}, r"unknown key privacy.num_examples"),
        (
            {
                "privacy__feature_scaling": {
                    "kind": "dp_moments",
                    "lower": 0.0,
                    "upper": 1.0,
                    "noise_multiplier": 4.0,
                }
            },
            r"privacy.feature_scaling.kind must be one of none, public, public_bounds, .*not 'dp_moments'",
        ),
        (
            {"algorithms": {"ifca": {}}, "export__algorithm": "ifca"},
            r"selects a cluster privately, calibrated to one row",
        ),
        ({"privacy__sampler": "paper_shuffled"}, r"unknown key privacy.sampler"),
        (
            {"tuning": {"search": {"algorithm": "mr_mtl", "values": {"prox_weight": [0.1, 1.0]}}}},
            r"tuning.search is calibrated to one row.* a person is in several",
        ),
    ],
)
def test_what_would_protect_single_rows_is_refused_before_anything_is_released(
    of_contacts, tmp_path, overrides, message
):
    with pytest.raises(ConfigError, match=message):
        build_method(of_contacts(**overrides), next(iter(overrides.get("algorithms", ALGORITHMS))))
    assert (tmp_path / "of_contacts" / "clients").exists()
    assert not (tmp_path / "of_contacts" / RELEASES_FILE).exists()


def test_without_privacy_anything_goes(of_contacts):
    algorithms = {"ifca": {"learning_rate": 0.3, "local_steps": 1}}
    config = of_contacts(privacy__kind="none", training__rounds=1, algorithms=algorithms, export__algorithm="ifca")
    train(config, "ifca", progress=False)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"


def test_independent_examples_are_refused(experiment):
    config = experiment(privacy__kind="contact_graph", algorithms=ALGORITHMS, export__algorithm="mr_mtl")
    with pytest.raises(ConfigError, match="manifest has no row_influence"):
        build_method(config, "mr_mtl")
