"""Clients added after training: from a trained experiment's export to the next version, and to served answers."""

import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from serving.client.rest_client import RestClient
from serving.client_ids import ClientIdHash
from serving.export.stored_models import read_models
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import DEMO
from tff_pdp.cli import main
from tff_pdp.errors import ConfigError, DataError, ServingError
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.model import build_model
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.new_clients import fit as new_client_rows
from tff_pdp.personal_models.new_clients.costs import claim_of_fit
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.personalize import (
    AddedClient,
    Personalized,
    personalize,
    personalized_content,
    personalized_text,
)
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.all_runs import Composed
from tff_pdp.training.record.releases import EARLIER, all_releases
from tff_pdp.training.train import train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_fresh_process")]

NAMES = ("east", "north", "south", "west")
# Of 120 examples. Where batches are of all examples, and rounds of all users, noise follows from a formula; for
# samples it takes seconds to work out.
NUM_TRAIN = 72
USERS = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": len(NAMES),
    "budgets": {"kind": "one_for_all", "epsilon": 50.0, "delta": 0.1},
}
SILOS = {
    "kind": "silo_example",
    "batch_size": NUM_TRAIN,
    "clip_norm": 1.0,
    "budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-3},
}
PAID = FitOptions(steps=30, learning_rate=0.5, epsilon=4.0, delta=1e-3)


def silo(name, number, size=120, *, is_flipped=False):
    """Points in a square, labelled by the sign of their first coordinate, or of minus that."""
    x = np.random.default_rng(number).uniform(-1, 1, (size, 2))
    return SiloArrays(name, x, np.where((x[:, 0] > 0) != is_flipped, 1, -1))


def config_of(folder, privacy, algorithm, hparams, silos=None, **overrides):
    write_silo_arrays(folder / "silos.npz", silos or [silo(name, number) for number, name in enumerate(NAMES)])
    settings = {
        "output": str(folder / "run"),
        "data.input": str(folder / "silos.npz"),
        "data.kind": "silo_files",
        "data.input_shape": [2],
        "data.num_classes": 2,
        "data.exact_split": True,
        "model": {"kind": "mlp", "hidden_units": [4]},
        "privacy": privacy,
        "training.rounds": 4,
        "training.evaluate_every": 4,
        "training.client_parallelism": "loop",
        "algorithms": {algorithm: hparams},
        "export.algorithm": algorithm,
        "tuning": {},
        **overrides,
    }
    return load_experiment(DEMO, settings)


def exported(*arguments, **overrides):
    config = config_of(*arguments, **overrides)
    prepare_clients(config)
    train(config, config.export.algorithm, progress=False)
    return config, export_experiment(config).version


def new_dataset(folder, silos):
    """Others' examples, prepared as those of training were."""
    folder.mkdir()
    config = config_of(folder, SILOS, "mr_mtl", {}, silos)
    prepare_clients(config)
    return config.clients_folder


def save(path, of):
    np.savez(path, x=of.x.astype(np.float32), y=np.asarray(of.y) > 0)
    return path


def json_of(version, name):
    return json.loads((version / "assets.extra" / f"{name}.json").read_text())


def releases_of(config, client_id):
    """How many runs and fits of a silo are on record."""
    return sum(client_id in release.ledger.budgets for release in all_releases(Path(config.output)))


def arrays_of(config, version):
    """What an export holds by client: every row that requests can ask for."""
    models = read_models(version, build_model(config))
    by_client = {
        client_id: {name: stack[row] for name, stack in models.stacked.items()}
        for client_id, row in zip(models.client_ids, models.rows, strict=True)
    }
    return {"shared": models.shared, "global": {name: stack[0] for name, stack in models.stacked.items()}, **by_client}


def assert_same_bits(before, after):
    for client_id, arrays in before.items():
        assert arrays.keys() == after[client_id].keys()
        for name, array in arrays.items():
            assert array.tobytes() == after[client_id][name].tobytes()


def served_accuracy(server, config, served_id, of, *, personalized=True):
    answer = RestClient(f"127.0.0.1:{server.rest_port}").predict(
        config.export.model_name, [served_id] * len(of.y), of.x.astype(np.float32)
    )
    assert (answer.personalized == personalized).all()
    return np.mean((answer.answers[:, 1] > 0.5) == (np.asarray(of.y) > 0))


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    """MR-MTL of four private silos, exported under hashed ids; tests add silos to it, each under names of its own."""
    return exported(tmp_path_factory.mktemp("silos"), SILOS, "mr_mtl", {"learning_rate": 0.5, "prox_weight": 0.1})


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """FedPer of four users, exported under plain ids."""
    hparams = {"learning_rate": 0.5, "local_steps": 5}
    return exported(tmp_path_factory.mktemp("users"), USERS, "fed_per", hparams, **{"export.client_ids": "plain"})


def test_a_running_server_takes_up_a_new_user_whose_model_fits_and_nobody_elses_changes(users, tmp_path):
    config, version = users
    new = silo("carol", 7, is_flipped=True)
    dataset = new_dataset(tmp_path / "new", [new, silo("dave", 8)])
    before = arrays_of(config, version)
    with EmbeddedServer([ServedModel(config.export.model_name, config.export_folder)]) as server:
        assert served_accuracy(server, config, "carol", new, personalized=False) < 0.5
        done = personalize(config, dataset, ["carol"], FitOptions(steps=300, learning_rate=1.0), progress=False)
        assert int(done.version.name) == int(version.name) + 1
        deadline = time.monotonic() + 30
        while True:
            answer = RestClient(f"127.0.0.1:{server.rest_port}").predict(
                config.export.model_name, ["carol"], np.zeros((1, 2), np.float32)
            )
            if answer.personalized.all():
                break
            assert time.monotonic() < deadline, "the server does not take up the version"
            time.sleep(0.1)
        assert served_accuracy(server, config, "carol", new) > 0.8
    after = arrays_of(config, done.version)
    assert after.keys() - before.keys() == {"carol"}
    assert_same_bits(before, after)
    (carol,) = done.clients
    assert (carol.client_id, carol.served_as) == ("carol", "carol")
    assert carol.before["accuracy"] < 0.5 < 0.8 < carol.after["accuracy"]
    assert carol.after["loss"] < carol.before["loss"]
    assert (carol.epsilon, carol.delta, carol.noise_multiplier, carol.recorded) == (None, None, None, None)
    report, card = json_of(done.version, "privacy_report"), json_of(done.version, "model_card")
    assert report["epsilon"] == json_of(version, "privacy_report")["epsilon"], "what is shared has not changed"
    assert "without noise" in report["clients_added_after_training"]
    assert "paragraphs" in json_of(version, "privacy_report") and "paragraphs" not in report
    assert (card["clients"], card["clients_fitted_after_training"]) == (5, 1)
    assert not (Path(config.output) / EARLIER).exists()


def test_a_user_needs_no_budget_and_may_not_give_one(users, tmp_path):
    config, _ = users
    file = save(tmp_path / "erin.npz", silo("erin", 9))
    for options in (FitOptions(epsilon=1.0), FitOptions(delta=1e-5), FitOptions(clip_norm=1.0)):
        with pytest.raises(ConfigError, match=r"is for silos whose examples are protected"):
            personalize(config, file, ["erin"], options, progress=False)


def test_a_silo_pays_and_what_is_on_record_adds_up(silos, tmp_path):
    config, version = silos
    dataset = new_dataset(tmp_path / "new", [silo("clinic", 11, is_flipped=True), silo("north", 12)])
    hashed = {name: ClientIdHash.load(config.client_id_key)(name) for name in ("clinic", "north")}
    before = arrays_of(config, version)
    done = personalize(config, dataset, ["clinic"], PAID, progress=False)
    (clinic,) = done.clients
    assert (clinic.served_as, clinic.num_examples) == (hashed["clinic"], NUM_TRAIN)
    assert 0.99 * 4 < clinic.epsilon <= 4
    assert clinic.recorded.epsilon == clinic.epsilon
    after = arrays_of(config, done.version)
    assert after.keys() - before.keys() == {hashed["clinic"]}
    assert_same_bits(before, after)
    rows = {row["id"]: row for row in json_of(done.version, "privacy_report")["silos"]}
    assert rows[hashed["clinic"]] == {
        "id": hashed["clinic"],
        "claim": "formal-conditional",
        "claim_reason": claim_of_fit("philox")[1],
        "epsilon": clinic.epsilon,
        "delta": 1e-3,
        "releases_on_record": 1,
        "added_after_training": True,
    }
    others = {row["id"]: row for row in json_of(version, "privacy_report")["silos"]}
    assert len(others) == 4 and others.items() <= rows.items()

    for name in hashed:
        with pytest.raises(ServingError, match=rf"'{name}' is in .* already. Give --replace"):
            personalize(config, dataset, [name], PAID, progress=False)
    assert releases_of(config, "clinic") == 1, "a refusal costs nothing"

    again = personalize(config, dataset, options=dataclasses.replace(PAID, replace=True), progress=False)
    twice, north = again.clients
    assert twice.noise_multiplier == clinic.noise_multiplier
    assert clinic.epsilon < twice.recorded.epsilon < 2 * clinic.epsilon
    rows = {row["id"]: row for row in json_of(again.version, "privacy_report")["silos"]}
    assert (rows[hashed["clinic"]]["epsilon"], rows[hashed["clinic"]]["releases_on_record"]) == (
        twice.recorded.epsilon,
        2,
    )
    replaced = arrays_of(config, again.version)
    del before[hashed["north"]]
    assert_same_bits(before, replaced)
    # The same examples and settings, other batches and noise.
    name = next(iter(build_model(config).head))
    assert not np.array_equal(after[hashed["clinic"]][name], replaced[hashed["clinic"]][name])

    # A silo that was in training pays on top of that.
    trained = others[hashed["north"]]["epsilon"]
    assert max(trained, north.epsilon) < north.recorded.epsilon < trained + north.epsilon
    assert north.recorded.releases == 2
    summary = evaluate_experiment(config)
    assert summary["privacy"]["composed"]["epsilon"] >= north.recorded.epsilon


def test_a_fit_that_dies_has_spent(silos, tmp_path, monkeypatch):
    config, _ = silos
    file = save(tmp_path / "ward.npz", silo("ward", 13, NUM_TRAIN))
    before = sorted(config.export_folder.iterdir())

    def die(*arguments):
        assert releases_of(config, "ward") == 1, "on record before it begins"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(new_client_rows, "fit_rows", die)
        with pytest.raises(KeyboardInterrupt):
            personalize(config, file, ["ward"], PAID, progress=False)
    assert sorted(config.export_folder.iterdir()) == before
    assert releases_of(config, "ward") == 1


def test_a_record_that_cannot_be_read_stops_the_fit(silos, tmp_path, monkeypatch):
    config, _ = silos
    record = Path(config.output) / EARLIER
    before = record.read_bytes() if record.exists() else b""
    monkeypatch.setattr(new_client_rows, "fit_rows", lambda *arguments: pytest.fail("the silo's examples are used"))
    record.write_bytes(before + b'{"run": "perso\n{"run": "personalize"}\n')
    try:
        with pytest.raises(DataError, match=rf"{EARLIER}: line \d+ (cannot be read|is damaged)"):
            personalize(
                config, save(tmp_path / "ward.npz", silo("ward", 13, NUM_TRAIN)), ["ward"], PAID, progress=False
            )
    finally:
        record.write_bytes(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FitOptions(), "--epsilon and --delta are needed"),
        (FitOptions(epsilon=1.0), "--epsilon and --delta are needed"),
        (FitOptions(epsilon=float("inf"), delta=1e-3), "finite"),
        (FitOptions(epsilon=-1.0, delta=1e-3), "epsilon must be a number above 0"),
        (FitOptions(epsilon=1.0, delta=0.05), "not below 1 / 120"),
        (FitOptions(epsilon=1.0, delta=1e-3, steps=0), "--steps must be positive"),
        (FitOptions(epsilon=1.0, delta=1e-3, learning_rate=-1), "--learning-rate must be positive"),
    ],
)
def test_wrong_options_cost_nothing(silos, tmp_path, options, message):
    config, _ = silos
    file = save(tmp_path / "lab.npz", silo("lab", 14))
    with pytest.raises(ConfigError, match=message):
        personalize(config, file, ["lab"], options, progress=False)
    assert releases_of(config, "lab") == 0


@pytest.mark.parametrize("privacy", [{"kind": "none", "unit": "silo", "batch_size": 32}, USERS])
def test_the_plan_of_the_export_counts_and_not_the_one_at_hand(silos, tmp_path, privacy):
    config, _ = silos
    other = load_experiment(DEMO, {**config.to_dict(), "privacy": privacy})
    with pytest.raises(ConfigError, match=r"was not trained with privacy\.kind .* with budgets of silos"):
        personalize(other, save(tmp_path / "lab.npz", silo("lab", 14)), ["lab"], progress=False)


def test_ids_in_plain_text_do_not_go_among_hashed_ones(silos, tmp_path):
    config, _ = silos
    plain = load_experiment(DEMO, {**config.to_dict(), "export.client_ids": "plain"})
    with pytest.raises(ConfigError, match=r"export\.client_ids is 'plain', but the ids in .* are hashed"):
        personalize(plain, save(tmp_path / "lab.npz", silo("lab", 14)), ["lab"], PAID, progress=False)


def test_wrong_examples_and_ids_cost_nothing(silos, tmp_path):
    config, _ = silos
    of = silo("lab", 14)
    np.savez(tmp_path / "bad.npz", x=of.x, y=np.full(120, 2))
    with pytest.raises(DataError, match=r"bad\.npz: row 0 of y .* is not a class from 0 to 1"):
        personalize(config, tmp_path / "bad.npz", ["lab"], PAID, progress=False)
    assert releases_of(config, "lab") == 0


def test_the_command_adds_a_silo_and_says_what_it_will_do_and_what_it_cost(silos, tmp_path, capsys):
    config, _ = silos
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(config.to_dict()))
    dataset = new_dataset(tmp_path / "new", [silo("annex", 15), silo("branch", 16)])
    arguments = ["personalize", "--config", str(path), "--examples", str(dataset), "--steps", "20"]
    paid = ["--epsilon", "3", "--delta", "1e-3", "--learning-rate", "0.3", "--batch-size", "16", "--clip-norm", "2"]
    assert main(arguments) == 2
    assert "--epsilon and --delta are needed" in capsys.readouterr().err
    assert main([*arguments, *paid, "--client-id", "annex"]) == 0
    printed = capsys.readouterr()
    assert "1 clients added: " in printed.out and "annex (served as " in printed.out
    assert "spent epsilon 3 at delta 0.001, noise multiplier " in printed.out
    assert "not private" in printed.out
    assert (
        "each of 1 clients trains its head by 20 steps of DP-SGD from the global model's, for epsilon 3 at delta 0.001"
        in printed.err
    )


def test_what_was_done_is_told_to_people_and_programs():
    recorded = Composed(
        math.inf, 1e-3, frozenset({0, 1}), "the noise of a run on record follows from training.test_only_seed"
    )
    metrics = {"accuracy": 0.5, "loss": 0.75}
    annex = AddedClient("annex", "c0ffee", 96, metrics, {"accuracy": 1.0, "loss": 0.1}, 2.5, 1e-3, 1.25, recorded)
    done = Personalized(Path("export/2"), [annex], ["empty"])
    lines = personalized_text(done).splitlines()
    assert lines[0] == "1 clients added: export/2"
    assert lines[1] == (
        "annex (served as c0ffee): 96 examples; accuracy 0.5 -> 1; loss 0.75 -> 0.1; spent epsilon 2.5 at delta 0.001, "
        "noise multiplier 1.25; with all 2 releases on record claim: none, and no epsilon: the noise of a run on "
        "record follows from training.test_only_seed"
    )
    assert lines[2] == "1 clients left out, without training examples, such as empty"
    content = json.loads(json.dumps(personalized_content(done), allow_nan=False))
    (client,) = content["clients"]
    assert (client["client_id"], client["delta"], client["before"]) == ("annex", 1e-3, metrics)
    assert (client["claim"], client["epsilon"]) == ("formal-conditional", 2.5)
    assert client["recorded"] == {
        "claim": "none",
        "claim_reason": recorded.why_no_bound,
        "epsilon": None,
        "delta": None,
        "releases_on_record": 2,
    }
    assert (content["version"], content["before_and_after_are_private"]) == ("export/2", False)


def test_a_silo_chooses_its_cluster_privately(tmp_path, capsys):
    flipped = [silo(name, number, is_flipped=number % 2 == 1) for number, name in enumerate("abcd")]
    hparams = {"learning_rate": 1.0, "num_clusters": 2, "local_steps": 5}
    config, version = exported(
        tmp_path,
        {**SILOS, "budgets": {"kind": "one_for_all", "epsilon": 30.0, "delta": 1e-3}, "selection_share": 0.1},
        "ifca",
        hparams,
        flipped,
        **{"training.rounds": 6, "training.test_only_seed": 1, "export.layout": "clusters"},
    )
    dataset = new_dataset(tmp_path / "new", [silo("even", 31), silo("odd", 32, is_flipped=True)])
    before = read_models(version, build_model(config))
    with pytest.raises(ConfigError, match="--steps does nothing here: clients of ifca share the models of clusters"):
        personalize(config, dataset, options=FitOptions(steps=50, epsilon=1.0, delta=1e-3), progress=False)
    done = personalize(config, dataset, options=FitOptions(epsilon=1.0, delta=1e-3))
    assert "chooses one of 2 clusters' models by the exponential mechanism, for epsilon 1" in capsys.readouterr().err
    # The other cluster's is right where this one is wrong.
    assert [client.after["accuracy"] > 0.8 for client in done.clients] == [True, True]
    # One epsilon-DP choice; nothing was noised.
    assert [client.noise_multiplier for client in done.clients] == [None, None]
    assert all(0.5 < client.epsilon <= 1 for client in done.clients)
    after = read_models(done.version, build_model(config))
    for name, stack in before.stacked.items():
        assert stack.tobytes() == after.stacked[name].tobytes(), "no row is added"
    row_of = dict(zip(after.client_ids, after.rows, strict=True))
    even, odd = (row_of[client.served_as] for client in done.clients)
    assert even != odd and 0 not in (even, odd)
    assert json_of(done.version, "privacy_report")["silos"][-1]["releases_on_record"] == 1


@pytest.mark.all
def test_a_descriptor_is_fitted_to_a_new_user(tmp_path):
    hparams = {"learning_rate": 0.3, "local_steps": 10, "descriptor_size": 4, "hidden_units": [16], "head_scale": 1.0}
    config, version = exported(tmp_path, USERS, "udp_hypernet", hparams, **{"export.layout": "hypernetwork"})
    dataset = new_dataset(tmp_path / "new", [silo("carol", 7, is_flipped=True)])
    done = personalize(config, dataset, options=FitOptions(steps=300, learning_rate=0.3), progress=False)
    (carol,) = done.clients
    # How often she is right depends on what four numbers can express of hers: the fit lessens her loss.
    assert carol.after["loss"] < 0.7 * carol.before["loss"]
    assert done.version != version


def test_methods_and_plans_without_personal_parts_are_refused(tmp_path):
    config, _ = exported(tmp_path, SILOS, "fed_avg", {"learning_rate": 0.5}, **{"training.rounds": 1})
    file = save(tmp_path / "lab.npz", silo("lab", 14))
    with pytest.raises(ConfigError, match="no personal part"):
        personalize(config, file, ["lab"], PAID, progress=False)
    graph = load_experiment(DEMO, {**config.to_dict(), "privacy": {**SILOS, "kind": "contact_graph"}})
    with pytest.raises(ConfigError, match="contact_graph: examples are rows made of people's contacts"):
        personalize(graph, file, ["lab"], PAID, progress=False)
    divided = load_experiment(DEMO, {**config.to_dict(), "export.layout": "per_client"})
    with pytest.raises(ConfigError, match="every client has an export of its own"):
        personalize(divided, file, ["lab"], PAID, progress=False)
    nothing = load_experiment(DEMO, {**config.to_dict(), "export.model_name": "other"})
    with pytest.raises(ServingError, match="run `tff-pdp export` first"):
        personalize(nothing, file, ["lab"], PAID, progress=False)
    # As `auto` divides what is large.
    (nothing.export_folder.parent / f"other.{64 * 'a'}").mkdir()
    with pytest.raises(ConfigError, match=r"every client has an export of its own.*Export with export.layout stacked"):
        personalize(nothing, file, ["lab"], PAID, progress=False)


@pytest.mark.all
def test_a_thousand_users_are_added_at_once(users, tmp_path, monkeypatch):
    config, _ = users
    new = [silo(f"user{number:04}", number, 12 + number % 20) for number in range(1000)]
    dataset = new_dataset(tmp_path / "new", new)
    traced = []
    fit_rows = new_client_rows.fit_rows
    monkeypatch.setattr(new_client_rows, "fit_rows", lambda *a: (traced.append(time.monotonic()), fit_rows(*a))[1])
    started = time.monotonic()
    done = personalize(config, dataset, options=FitOptions(steps=50), progress=False)
    assert len(done.clients) == 1000 and len(traced) == 1
    assert time.monotonic() - started < 120
    assert np.mean([client.after["loss"] < client.before["loss"] for client in done.clients if client.after]) > 0.9
