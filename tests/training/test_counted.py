"""All runs on the same records count, in whichever folders they are, and whatever has become of these."""

import contextlib
import dataclasses
import hashlib
import json
import shutil

import dp_accounting
import numpy as np
import pytest
from msgspec.structs import replace

from serving.saved_model.layout import MODEL_CARD_FILE, PRIVACY_REPORT_FILE
from tests.data.written_clients import write_clients
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import build_method
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.plans.plan import DRAWN_NOISE
from tff_pdp.registry.entries import Registry
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training import train as training
from tff_pdp.training.counted import cost_of_all_runs, enter_finished, enter_run, planned_ledger
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.train import train

NAME = "fed_avg"
ONE = {
    "algorithms": {NAME: {}},
    "export__algorithm": NAME,
    "training__test_only_seed": None,
    "training__rounds": 2,
    "training__checkpoint_every": 1,
    "privacy__budgets": {"kind": "one_for_all", "epsilon": 4.0, "delta": 1e-4},
    "tuning": {},
}


def write_silos(output, **silos):
    """A client dataset of made-up digits: by silo, the numbers of its first and last training record."""
    extents = []
    for silo, (first, last) in sorted(silos.items()):
        for split, offset in (("train", 0), ("validation", 10**6), ("test", 2 * 10**6)):
            numbers = range(first + offset, (last if split == "train" else first + 3) + offset)
            x = np.stack([np.random.default_rng(number).uniform(size=64) for number in numbers]).astype(np.float32)
            extents.append((silo, split, 0, x, np.arange(len(x)) % 10))
    output.mkdir(parents=True)
    write_clients(output / "clients", FeatureSpec.of((8, 8, 1), 10), extents)


@pytest.fixture
def run(experiment, tmp_path):
    """A function that trains in a folder of its own and returns the experiment."""

    def build(name, silos=None, overwrite=False, **overrides):
        if silos and not (tmp_path / name).exists():
            write_silos(tmp_path / name, **silos)
        config = experiment(name, **{**ONE, **overrides})
        train(config, NAME, overwrite=overwrite, progress=False)
        return config

    return build


def composed(config):
    return evaluate_experiment(config)["privacy"]["composed"]


def by_hand(*configs, silo, delta=1e-4):
    """Epsilon of everything that silos of one name have in the ledgers of these runs."""
    entries = [
        entry
        for config in configs
        for entry in read_charges(config.algorithm_folder(NAME)).ledger.entries
        if entry.scope == silo
    ]
    parts = [dp_accounting.SelfComposedDpEvent(entry.event, entry.count) for entry in entries]
    return epsilon_bounds(dp_accounting.ComposedDpEvent(parts), delta).best


def test_two_private_runs_in_two_folders_compose(run):
    one, two = run("one"), run("two")
    for config in (one, two):
        found = composed(config)
        assert (found["methods"], found["in_other_folders"]) == (2, 1)
        assert found["epsilon"] == max(by_hand(one, two, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))
        assert found["epsilon"] > 5


def test_a_noise_free_run_leaves_no_bound_for_one_with_noise(run):
    """In two folders, on records of which some are the same."""
    bare = run("one", {"a": (0, 40), "b": (40, 80)}, privacy__kind="none", privacy__budgets=None)
    private = run("two", {"p": (79, 120)})
    found = composed(private)
    assert (found["methods"], found["claim"], found["epsilon"]) == (2, "none", None)
    assert "privacy is switched off" in found["claim_reason"]
    assert str(bare.algorithm_folder(NAME)) in found["claim_reason"]
    page = (private.clients_folder.parent / "report.html").read_text()
    assert "No finite ε holds for the models of all 2 runs together, 1 of them in other folders" in page


def test_a_run_under_a_known_seed_stays_on_record_after_its_folder_was_deleted(run):
    seeded = run("one", training__test_only_seed=1)
    shutil.rmtree(seeded.output)
    found = composed(run("two"))
    assert (found["claim"], found["epsilon"]) == ("none", None)
    assert "training.test_only_seed" in found["claim_reason"]


def test_disjoint_records_do_not_compose(run):
    run("one", {"a": (0, 40)}, privacy__kind="none", privacy__budgets=None)
    found = composed(run("two", {"a": (40, 80)}))
    assert (found["methods"], found["claim"]) == (1, "formal-conditional")
    assert "in_other_folders" not in found


def test_partly_overlapping_records_compose_in_the_silo_that_has_them(run):
    one = run("one", {"a": (0, 40)})
    two = run("two", {"b": (39, 80), "c": (80, 120)}, training__rounds=1)
    found = composed(two)
    parts = [*read_charges(one.algorithm_folder(NAME)).ledger.entries]
    parts += [entry for entry in read_charges(two.algorithm_folder(NAME)).ledger.entries if entry.scope == "b"]
    both = [dp_accounting.SelfComposedDpEvent(entry.event, entry.count) for entry in parts]
    assert found["epsilon"] == epsilon_bounds(dp_accounting.ComposedDpEvent(both), 1e-4).best
    assert found["epsilon"] > 1.5 * by_hand(two, silo="c")


def test_a_deleted_or_moved_folder_still_counts(run, tmp_path):
    one, two = run("one"), run("two")
    before = composed(two)
    (tmp_path / "one").rename(tmp_path / "moved")
    assert composed(two) == before
    shutil.rmtree(tmp_path / "moved")
    assert composed(two) == before
    assert not one.algorithm_folder(NAME).exists()


def test_a_run_that_was_stopped_and_deleted_counts_with_all_that_was_planned(run, experiment, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stopped(*_):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(training, "run_round", stopped)
        with pytest.raises(Stopped):
            run("one")
    shutil.rmtree(tmp_path / "one")
    two = run("two")
    found = composed(two)
    assert found["methods"] == 2
    assert found["epsilon"] == max(by_hand(two, two, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))


def test_a_run_that_was_stopped_before_its_first_noise_does_not_count(run, monkeypatch):
    class Stopped(Exception):
        pass

    def stopped(*_):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(training, "save", stopped)
        with pytest.raises(Stopped):
            run("one")
    assert len(Registry().entries()) == 1, "entered before anything is released"
    run("one")
    assert composed(run("two"))["methods"] == 2


def test_a_run_that_goes_on_after_all_counts_to_its_end(run, experiment, monkeypatch, tmp_path):
    """One was stopped after its first round, another was about to replace it, and was killed before it did."""

    class Stopped(Exception):
        pass

    def stopped(method, state, number, data):
        if number == 2:
            raise Stopped
        return run_round(method, state, number, data)

    run_round = training.run_round
    with monkeypatch.context() as patch:
        patch.setattr(training, "run_round", stopped)
        patch.setattr("tff_pdp.training.spending._SHARE", 2)
        with pytest.raises(Stopped):
            run("one")
    with monkeypatch.context() as patch:
        patch.setattr(training, "set_aside", stopped)
        with pytest.raises(TypeError):
            run("one", overwrite=True)
    config = experiment("one", **ONE)
    assert Registry().entries()[0].closed
    train(config, NAME, resume=True, progress=False)
    one = read_charges(config.algorithm_folder(NAME)).ledger
    assert Registry().entries()[0].upper.ledger.to_json() == one.to_json()
    shutil.rmtree(tmp_path / "one")
    two = run("two")
    assert composed(two)["epsilon"] == max(by_hand(two, two, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))


@pytest.mark.parametrize("is_done", [False, True])
def test_a_folder_that_is_restored_from_an_older_copy_counts_with_all_that_the_run_may_have_spent(
    run, experiment, monkeypatch, tmp_path, is_done
):
    class Stopped(Exception):
        pass

    def stopping_before(last):
        def stopped(method, state, number, data):
            if number == last:
                raise Stopped
            return run_round(method, state, number, data)

        return stopped

    run_round = training.run_round
    with monkeypatch.context() as patch:
        patch.setattr(training, "run_round", stopping_before(2))
        patch.setattr("tff_pdp.training.spending._SHARE", 4)
        with pytest.raises(Stopped):
            run("one", training__rounds=4)
        config = experiment("one", **{**ONE, "training__rounds": 4})
        folder = config.algorithm_folder(NAME)
        shutil.copytree(folder, tmp_path / "older")
        patch.setattr(training, "run_round", run_round if is_done else stopping_before(4))
        with contextlib.suppress(Stopped):
            train(config, NAME, resume=True, progress=False)
    whole = max(by_hand(config, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "older", folder)
    older = max(by_hand(config, silo=silo) for silo in ("silo_00", "silo_01", "silo_02"))
    assert older < whole
    method = build_method(config, NAME)
    assert cost_of_all_runs(config, method).worst.epsilon == pytest.approx(whole, rel=1e-6)
    # Nor does it go on: on another machine the same noise would be added to other last bits.
    with pytest.raises(
        DataError, match=r"lacks rounds of its run that the registry .* lists: another copy of the run was continued"
    ):
        train(config, NAME, resume=True, progress=False)
    train(config, NAME, overwrite=True, progress=False)
    cost = cost_of_all_runs(config, method)
    assert cost.runs == 2
    assert cost.worst.epsilon > whole
    first, second = Registry().entries()
    one, other = (entry.upper.ledger.epsilon("silo_00").best for entry in (first, second))
    assert one == pytest.approx(other, rel=1e-6)


def test_no_digest_of_records_that_anyone_could_work_out_is_in_a_runs_folder(run):
    """Candidates for one record could be tried by somebody with all others."""
    config = run("one")
    digests = [build_method(config, NAME).config_hash]
    digests.append(hashlib.sha256((config.clients_folder / "manifest.json").read_bytes()).hexdigest())
    for path in config.algorithm_folder(NAME).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [digest for digest in digests if digest.encode() in content], path


def test_rounds_that_are_drawn_anew_raise_what_the_registry_has(run):
    config = run("one")
    folder = config.algorithm_folder(NAME)
    charges, state = read_charges(folder), checkpoints.load_latest(folder / "checkpoints")
    method = build_method(config, NAME)
    drawn_anew = dataclasses.replace(
        charges, is_closed=False, attempt=dataclasses.replace(charges.attempt, number=1, first_round=2)
    )
    half = method.plan.build_ledger()
    method.plan.charge_round(half, 1)
    more = planned_ledger(method.plan, dataclasses.replace(state, round_number=1, ledger=half))
    own = [entry.count for entry in more.entries if entry.scope == "silo_00" and entry.reason != DRAWN_NOISE]
    assert own == [1, 1], "one round, and the rest"
    enter_run(config, method, folder, drawn_anew, more)
    (entry,) = Registry().entries()
    assert (entry.upper.ledger.to_json(), entry.closed) == (more.to_json(), None)
    enter_finished(config, method, folder, charges)
    (entry,) = Registry().entries()
    assert entry.closed and entry.upper.ledger.to_json() == charges.ledger.to_json()


def test_replacing_a_run_says_what_the_records_have_cost(run, capsys):
    run("one")
    capsys.readouterr()
    config = run("two", overwrite=True)
    line = capsys.readouterr().err
    assert "fed_avg: 1 releases on record are about these records, 1 of them in other folders" in line
    assert "together they have spent epsilon 4 at delta 0.0001. Budgets are per run" in line
    run("two", overwrite=True)
    assert "2 releases on record are about these records" in capsys.readouterr().err
    assert composed(config)["methods"] == 3
    run("three", privacy__kind="none", privacy__budgets=None)
    capsys.readouterr()
    run("two", overwrite=True)
    assert "no epsilon holds for them together (a run on record (fed_avg in " in capsys.readouterr().err


def test_a_registry_that_is_damaged_stops_training_before_anything_is_released(run, experiment):
    run("one")
    path = Registry().path
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(DataError, match=r"registry\.jsonl: line 1 is damaged"):
        run("two")
    path.write_bytes(whole)
    config = experiment("two", **ONE)
    charges = read_charges(config.algorithm_folder(NAME))
    assert charges is None or not charges.through_round


def test_a_registry_may_be_named(run, tmp_path):
    own = {"privacy__registry": str(tmp_path / "ours")}
    run("one")
    config = run("two", **own)
    assert composed(config)["methods"] == 1
    assert Registry().find(read_charges(config.algorithm_folder(NAME)).run_id) is None
    named = Registry(tmp_path / "ours")
    assert [entry.folder for entry in named.entries()] == [str(config.algorithm_folder(NAME))]
    in_own_registry = replace(config, privacy=replace(config.privacy, registry=None))
    # Where a run is counted is not a setting of the run.
    assert composed(in_own_registry)["methods"] == 2


def test_record_sets_join_records_that_look_different(run):
    run("one", {"a": (0, 40)}, privacy__kind="none", privacy__budgets=None, data__record_set="clinic")
    assert composed(run("two", {"b": (40, 80)}, data__record_set="clinic"))["claim"] == "none"
    assert composed(run("three", {"c": (80, 120)}, data__record_set="school"))["methods"] == 1
    with pytest.raises(ConfigError, match=r"data\.record_set"):
        run("four", {"c": (80, 120)}, data__record_set={"c": 3})


USERS = {
    "privacy": {
        "kind": "user",
        "batch_size": 8,
        "clip_norm": 0.5,
        "users_per_round": 1.0,
        "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
    },
    "privacy__budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
}


@pytest.mark.parametrize(
    ("silos", "sets", "counted"),
    [
        ({"x": (100, 110), "y": (39, 50)}, (None, None), 2),
        ({"a": (100, 110), "y": (110, 120)}, (None, None), 2),
        ({"a": (100, 110), "y": (110, 120)}, ("town", "country"), 1),
        ({"x": (100, 110), "y": (110, 120)}, (None, None), 1),
    ],
    ids=["a record in common", "an id in common", "an id in common, declared to be another", "nothing in common"],
)
def test_users_compose_where_one_of_them_is_in_both(run, silos, sets, counted):
    run("one", {"a": (0, 20), "b": (20, 40)}, **USERS, data__record_set=sets[0])
    found = composed(run("two", silos, **USERS, data__record_set=sets[1]))
    assert found["methods"] == counted


def test_statistics_that_silos_release_again_in_another_folder_are_on_record(run, experiment, tmp_path):
    noised = {"privacy__num_examples": {"kind": "noised", "epsilon": 0.5}}
    one = run("one", **noised)
    assert composed(one)["methods"] == 1, "the statistics are in the run's own ledger"
    statistics, trained = Registry().entries()
    assert (statistics.method, trained.includes) == ("statistics before training", statistics.run_id)
    assert json.loads((tmp_path / "one" / "silo_releases.json").read_text())["release_id"] == statistics.run_id
    with pytest.raises(ConfigError, match=r"The registry .* counts old and new releases"):
        run("one", overwrite=True, privacy__num_examples={"kind": "noised", "epsilon": 0.4})
    # Released in another folder, where nothing is trained after all: a number of steps is too large for the data.
    endless = {NAME: {"local_steps": "9999999999 epochs"}}
    with pytest.raises(ConfigError, match="local_steps"):
        run("two", privacy__num_examples={"kind": "noised", "epsilon": 0.4}, algorithms=endless)
    assert not (tmp_path / "two" / NAME).exists()
    found = composed(one)
    assert (found["methods"], found["in_other_folders"]) == (2, 1)
    # Only budgets hold here: that of the run, and what was set aside for the statistics' folder.
    assert (found["epsilon"], found["delta"]) == (8.0, 2e-4)


def test_an_export_states_what_all_runs_cost(run, one_fresh_process):
    del one_fresh_process
    silos = {"a": (0, 40), "b": (40, 80)}
    bare = run("one", {"c": (0, 20)}, privacy__kind="none", privacy__budgets=None)
    config = run("two", silos, export__client_ids="plain")
    version = export_experiment(config).version
    report = json.loads((version / PRIVACY_REPORT_FILE).read_text())
    assert (report["claim"], report["composed"]["claim"], report["composed"]["epsilon"]) == (
        "formal-conditional",
        "none",
        None,
    )
    assert (report["composed"]["releases_on_record"], report["composed"]["in_other_folders"]) == (2, 1)
    assert str(bare.algorithm_folder(NAME)) in report["composed"]["claim_reason"]
    first, second = report["silos"]
    assert (first["composed"]["claim"], first["composed"]["epsilon"]) == ("none", None)
    assert (second["composed"]["claim"], second["composed"]["epsilon"]) == ("formal-conditional", second["epsilon"])
    card = json.loads((version / MODEL_CARD_FILE).read_text())
    assert card["composed"] == report["composed"]
    assert "other methods" not in report["not_covered"]
