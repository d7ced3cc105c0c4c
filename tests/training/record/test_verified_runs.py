"""Runs of the training loop verify, and can be sealed; what is left of them counts."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.training.record.whole_runs import SYNTHETIC, config_of
from tff_pdp.cli import main
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.before_training import RELEASES_FILE
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.experiment.synthetic_data import DATA_FILE, KEY_FILE
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.record.releases import all_releases
from tff_pdp.training.record.sealing import seal_run
from tff_pdp.training.train import train
from tff_pdp.verification.epsilons import recompute
from tff_pdp.verification.experiment import verify
from tff_pdp.verification.run_folder import Status

SETTINGS = {
    "training__test_only_seed": None,
    "training__rounds": 2,
    "training__checkpoint_every": 1,
    "model": {"kind": "linear"},
}
USERS = {
    "privacy": {
        "kind": "user",
        "batch_size": 16,
        "clip_norm": 0.5,
        "users_per_round": 2,
        "budgets": {"kind": "one_for_all", "epsilon": 20.0, "delta": 1e-3},
    },
    "algorithms": {"fed_per": {"learning_rate": 0.1, "local_steps": 2}},
    "export__algorithm": "fed_per",
    "model": {"kind": "mlp", "hidden_units": [8]},
}


def statuses(output):
    found = list(verify(Path(output)))
    return {one.status for one in found}, found


def test_runs_of_silos_verify_and_what_they_spent_is_what_the_summary_states(experiment):
    config = experiment(**SETTINGS)
    for name in ("fed_avg", "mr_mtl"):
        train(config, name, progress=False)
    summary = evaluate_experiment(config, ["fed_avg", "mr_mtl"])
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    recomputed = recompute(all_releases(Path(config.output)))
    assert max(recomputed.composed.values()) == pytest.approx(summary["privacy"]["composed"]["epsilon"], rel=1e-9)
    spent = {silo["id"]: silo["epsilon_spent"] for silo in summary["silos"]}
    assert spent == pytest.approx({silo: max(own[silo] for own in recomputed.own) for silo in spent}, rel=1e-9)
    # A sealed run still counts, and others are tested beside it.
    folder = config.algorithm_folder("mr_mtl")
    seal_run(folder, config.training.rounds)
    for refused in (
        lambda: train(config, "mr_mtl", resume=True, progress=False),
        lambda: train(config, "mr_mtl", progress=False),
        lambda: load_trained(config, "mr_mtl"),
    ):
        with pytest.raises(ConfigError, match="mr_mtl was sealed"):
            refused()
    again = evaluate_experiment(config, ["fed_avg"])
    assert again["privacy"]["composed"] == summary["privacy"]["composed"]
    assert again["algorithms"]["fed_avg"]["run"] == run_id_of(config.algorithm_folder("fed_avg"))
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    # Replaced, it counts on.
    train(config, "mr_mtl", overwrite=True, progress=False)
    assert len(all_releases(Path(config.output))) == 3
    found, findings = statuses(config.output)
    assert [one.path.name for one in findings if one.status is Status.PROBLEM] == ["summary.json"]
    assert math.isfinite(max(recomputed.composed.values()))


def test_a_run_of_users_verifies_before_and_after_it_is_sealed(experiment):
    config = experiment(**{**SETTINGS, **USERS})
    train(config, "fed_per", progress=False)
    evaluate_experiment(config)
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    assert any(one.path.name == "client_states" for one in findings)
    seal_run(config.algorithm_folder("fed_per"), config.training.rounds)
    with pytest.raises(ConfigError, match="fed_per was sealed"):
        evaluate_experiment(config)
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    assert not config.algorithm_folder("fed_per").joinpath("client_states").exists()


def test_a_run_with_a_fixed_seed_has_no_bound_anywhere(experiment):
    config = experiment(**{**SETTINGS, "training__test_only_seed": 1})
    train(config, "fed_avg", progress=False)
    evaluate_experiment(config, ["fed_avg"])
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    assert sum("no bound" in one.text for one in findings) == 2
    assert set(recompute(all_releases(Path(config.output))).composed.values()) == {math.inf}


def test_a_run_verifies_whose_records_another_folder_used_without_noise(experiment):
    budgets = {"kind": "by_silo", "delta": 1e-4, "silos": {"silo_01": math.inf}, "default_epsilon": 4.0}
    other = experiment("other", **{**SETTINGS, "privacy__budgets": budgets})
    train(other, "fed_avg", progress=False)
    config = experiment(**SETTINGS)
    train(config, "fed_avg", progress=False)
    composed = evaluate_experiment(config, ["fed_avg"])["privacy"]["composed"]
    assert (composed["claim"], composed["epsilon"], composed["in_other_folders"]) == ("none", None, 1)
    assert composed["claim_reason"] == "a run on record has silos without noise, or without a budget"
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings


def test_a_run_that_was_stopped_verifies_and_its_reservation_counts(experiment, monkeypatch):
    from tff_pdp.training import train as training

    config = experiment(**{**SETTINGS, "training__rounds": 4, "training__checkpoint_every": 2})
    real = training.run_round

    def failing(method, state, round_number, data):
        if round_number == 4:
            raise RuntimeError("the power went out")
        return real(method, state, round_number, data)

    monkeypatch.setattr(training, "run_round", failing)
    with pytest.raises(RuntimeError):
        train(config, "fed_avg", progress=False)
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    (charges,) = [one.text for one in findings if one.path.name == "charges.jsonl"]
    assert "rounds on record: 4, not closed" in charges
    with pytest.raises(ConfigError, match="2 of 4 rounds"):
        seal_run(config.algorithm_folder("fed_avg"), 4)


def test_a_run_whose_silos_are_all_without_noise_has_no_bound(experiment):
    config = experiment(**{**SETTINGS, "privacy__budgets": {"kind": "one_for_all", "epsilon": math.inf, "delta": 1e-4}})
    train(config, "fed_avg", progress=False)
    evaluate_experiment(config, ["fed_avg"])
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    texts = [one.text for one in findings]
    assert sum("no bound" in text for text in texts) == 2
    assert not any("inf" in text.split() for text in texts)


def test_with_noised_numbers_of_examples_budgets_are_what_verifies(experiment):
    config = experiment(**{**SETTINGS, "privacy__num_examples": {"kind": "noised", "epsilon": 0.5}})
    train(config, "fed_avg", progress=False)
    evaluate_experiment(config, ["fed_avg"])
    found, findings = statuses(config.output)
    assert found == {Status.OK}, findings
    assert any("only budgets hold" in one.text for one in findings), [one.text for one in findings]


@pytest.fixture(scope="module")
def with_synthetic_data(tmp_path_factory):
    """The folder of a run with two rounds on synthetic data, and one on records."""
    config = config_of(tmp_path_factory.mktemp("synthetic"), SYNTHETIC, "fed_avg", **{"training.rounds": 3})
    prepare_clients(config)
    train(config, "fed_avg", progress=False)
    return Path(config.output)


def flip_a_bit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (DATA_FILE, flip_a_bit, "is damaged, or of another release"),
        (DATA_FILE, Path.unlink, "is missing: restore the silos' synthetic data"),
        (RELEASES_FILE, flip_a_bit, RELEASES_FILE),
        (RELEASES_FILE, Path.unlink, RELEASES_FILE),
    ],
)
def test_synthetic_data_verify_unless_damaged_or_missing(with_synthetic_data, tmp_path, capsys, name, change, text):
    output = tmp_path / "run"
    shutil.copytree(with_synthetic_data, output)
    found, findings = statuses(output)
    assert found == {Status.OK}, findings
    assert [one.path.name for one in findings].count(DATA_FILE) == 1
    change(output / name)
    problems = [one for one in statuses(output)[1] if one.status is Status.PROBLEM]
    # Checkpoints know the file of releases, too.
    assert {one.path.name for one in problems if name not in one.text} == set()
    (own,) = [one for one in problems if one.path.name == name]
    assert text in own.text
    assert main(["verify", str(output)]) == 1
    assert f"problem  {output / name}: " in capsys.readouterr().out


def test_the_key_of_a_stopped_release_is_told(with_synthetic_data, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(with_synthetic_data, output)
    (output / KEY_FILE).write_text("{}")
    (stopped,) = [one for one in statuses(output)[1] if one.status is not Status.OK]
    assert (stopped.path.name, stopped.status) == (KEY_FILE, Status.STOPPED)


def test_a_delta_below_what_all_runs_hold_at_is_found(experiment):
    config = experiment(**SETTINGS)
    train(config, "fed_avg", progress=False)
    evaluate_experiment(config, ["fed_avg"])
    path = Path(config.output) / "summary.json"
    content = json.loads(path.read_text())
    content["privacy"]["composed"]["delta"] = 1e-5
    path.write_text(json.dumps(content))
    found, findings = statuses(config.output)
    assert Status.PROBLEM in found
    assert any("states delta 1e-05 of all runs, which together need 0.0001" in one.text for one in findings)


def test_statistics_of_another_registry_are_told_as_such(experiment, monkeypatch, tmp_path):
    config = experiment(**{**SETTINGS, "privacy__num_examples": {"kind": "noised", "epsilon": 0.5}})
    train(config, "fed_avg", progress=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"are in another registry than .*elsewhere.* Name that other registry"):
        train(config, "fed_avg", resume=True, progress=False)
