"""A client is removed from an experiment: nothing of it is left but what the command states."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from serving.client_ids import ClientIdHash
from serving.export.stored_models import read_models
from tests.personal_models.new_clients.test_personalize import SILOS, USERS, assert_same_bits, config_of, silo
from tests.tiers import parameters
from tff_pdp.cli import main
from tff_pdp.commands import forget as command
from tff_pdp.commands.forget import forget
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_model
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.record.forgotten import read_removals
from tff_pdp.training.train import train
from tff_pdp.verification.experiment import verify

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_fresh_process")]

NAMES = ("east", "north", "south", "west")
GONE = "north"
# One value of north's that no other file may contain by chance.
MARK = np.float32(0.123456789)


def silos(names=NAMES):
    """Silos of points; a silo has the same points whichever others there are."""
    found = []
    for name in names:
        own = silo(name, NAMES.index(name))
        x = own.x.astype(np.float32)
        if name == GONE:
            x[:, 1] = MARK
        found.append(SiloArrays(name, x, own.y))
    return found


def made(folder, privacy=SILOS, method="mr_mtl", hparams=None, **overrides):
    """An experiment that is trained, tested and exported."""
    folder.mkdir(exist_ok=True)
    hparams = {"learning_rate": 0.5, "prox_weight": 0.1} if hparams is None else hparams
    config = config_of(folder, privacy, method, hparams, silos(), **overrides)
    prepare_clients(config)
    # One client's example that cannot be used.
    letters = config.clients_folder / "dead_letters" / "part-00000.jsonl"
    rows = [
        {"source": "s", "client": name, "example": 3, "reason": "label_out_of_range", "raw": "9", "num_examples": 1}
        for name in (GONE, "west")
    ]
    letters.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(config, method, progress=False)
    evaluate_experiment(config)
    export_experiment(config)
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return made(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def experiment(trained, tmp_path):
    """A copy of the experiment, for a test of its own."""
    shutil.copytree(Path(trained.output).parent, tmp_path / "copy")
    return config_of(tmp_path / "copy", SILOS, "mr_mtl", {"learning_rate": 0.5, "prox_weight": 0.1}, silos())


def problems(config):
    return [finding for finding in verify(Path(config.output)) if finding.status == "problem"]


def arrays_of(config, version):
    models = read_models(version, build_model(config))
    rows = zip(models.client_ids, models.rows, strict=True)
    own = {one: {name: stack[row] for name, stack in models.stacked.items()} for one, row in rows}
    return {"shared": models.shared, "": {name: stack[0] for name, stack in models.stacked.items()}, **own}


def files_with(folder, content):
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


def newest(config):
    return max(config.export_folder.glob("[0-9]*"), key=lambda path: int(path.name))


def test_nothing_is_left_but_what_is_stated(experiment, tmp_path):
    config, output = experiment, Path(experiment.output)
    assert files_with(output, MARK.tobytes())
    before, hashed = arrays_of(config, newest(config)), ClientIdHash.load(config.client_id_key)(GONE)
    spending = read_charges(output / "mr_mtl").ledger
    done = forget(config, GONE)
    # Records, and whatever was computed from them alone.
    assert not files_with(output, MARK.tobytes())
    assert not list(output.glob("mr_mtl/checkpoints/*/state.npz"))
    dataset = ClientDataset.open(config.clients_folder, verify=True)
    assert dataset.client_ids == ("east", "south", "west")
    letters = (config.clients_folder / "dead_letters" / "part-00000.jsonl").read_text()
    assert ('"north"' in letters, '"west"' in letters) == (False, True)
    # As a job on the input of all others would have written it.
    write_silo_arrays(tmp_path / "others" / "silos.npz", silos([one for one in NAMES if one != GONE]))
    other = config_of(tmp_path / "others", SILOS, "mr_mtl", {}, silos([one for one in NAMES if one != GONE]))
    prepare_clients(other)
    expected = ClientDataset.open(other.clients_folder)
    assert dataset.manifest.shards == expected.manifest.shards
    assert dataset.manifest.index == expected.manifest.index
    assert (dataset.manifest.kept, dataset.manifest.num_examples) == (
        expected.manifest.kept,
        expected.manifest.num_examples,
    )
    # The export: one version, without the row, with all others' rows as they were.
    assert [path.name for path in config.export_folder.glob("[0-9]*")] == ["2"]
    assert not files_with(output / "export", hashed.encode())
    after = arrays_of(config, newest(config))
    assert hashed not in after
    assert_same_bits({one: own for one, own in before.items() if one != hashed}, after)
    card = json.loads((newest(config) / "assets.extra" / "model_card.json").read_text())
    assert (card["clients"], card["clients_removed"]) == (3, 1)
    report = json.loads((newest(config) / "assets.extra" / "privacy_report.json").read_text())
    assert len(report["silos"]) == 3
    # Results.
    summary = json.loads((output / "summary.json").read_text())
    assert [row["id"] for row in summary["silos"]] == ["east", "south", "west"]
    assert not (output / "report.html").exists()
    assert not problems(config)
    # The statement.
    assert math.isclose(done.remaining.epsilon, spending.epsilon(GONE).best, rel_tol=1e-6)
    assert done.remaining.delta == 1e-3
    assert report["clients_removed"] in done.text()
    assert "one record of the client" in done.text()
    assert read_charges(output / "mr_mtl").ledger.to_json() == spending.to_json()
    (removal,) = read_removals(output)
    assert removal.after is not None
    assert removal.before != removal.after
    assert not files_with(output, f"{GONE}".encode() + b'","kind":"began"')
    with pytest.raises(ConfigError, match="'north' was removed already"):
        forget(config, GONE)


STEPS = ("publish_without", "seal_run", "remove_client", "write_summary", "end_removal")


@pytest.mark.parametrize(
    ("step", "is_done"),
    parameters(
        [(step, is_done) for step in STEPS for is_done in (False, True)],
        test=[("publish_without", True), ("remove_client", False)],
    ),
)
def test_a_removal_that_was_stopped_is_completed_by_the_same_command(experiment, monkeypatch, step, is_done):
    real = getattr(command, step)

    def fails(*arguments, **options):
        if is_done:
            real(*arguments, **options)
        raise RuntimeError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr(command, step, fails)
        with pytest.raises(RuntimeError, match="the power went out"):
            forget(experiment, GONE)
    if not (step == "end_removal" and is_done):
        assert any("were stopped" in finding.text for finding in verify(Path(experiment.output)))
        forget(experiment, GONE)
    output = Path(experiment.output)
    assert not files_with(output, MARK.tobytes())
    assert not files_with(output / "export", ClientIdHash.load(experiment.client_id_key)(GONE).encode())
    assert len(list(experiment.export_folder.glob("[0-9]*"))) == 1
    assert not problems(experiment)


def test_runs_that_are_needed_are_not_destroyed_unasked(experiment):
    output = Path(experiment.output)
    (output / "summary.json").unlink()
    with pytest.raises(ConfigError, match="run `tff-pdp evaluate` first"):
        forget(experiment, GONE)
    with pytest.raises(ConfigError, match="'nobody' is neither in the client dataset nor in an export"):
        forget(experiment, "nobody")
    assert files_with(output, MARK.tobytes())
    assert list(output.glob("mr_mtl/checkpoints/*/state.npz"))


def test_a_user_is_removed_by_the_command(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "users"
    config = made(folder, USERS, "fed_per", {"learning_rate": 0.5}, **{"export.client_ids": "plain"})
    settings = {"output": str(config.output)}
    monkeypatch.setattr("tff_pdp.experiment.config.load_experiment", lambda *_: config)
    assert main(["forget", "--config", "users.yaml", "--client", GONE, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["remaining"]["scope"] == "the client as a whole"
    assert done["remaining"]["epsilon"] <= 50
    output = Path(settings["output"])
    assert not (output / "fed_per" / "client_states").exists()
    assert not files_with(output / "export", GONE.encode())
    assert not files_with(output, MARK.tobytes())
    assert not problems(config)
