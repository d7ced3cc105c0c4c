"""Commands on a disk without room: one line that names the path, and the same command works once there is room."""

import json

import pytest

import beam_pipelines.__main__ as jobs
from beam_pipelines.sources.partition import write_digits_leaf
from serving.saved_model import layout
from tests.places import DEMO
from tff_pdp import cli
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import sentence_for_user
from tff_pdp.registry.entries import Registry
from tff_pdp.training.record.charges import read_charges


@pytest.fixture(scope="module")
def leaf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "leaf"
    write_digits_leaf(folder, num_clients=3, concentration=1.0, seed=0)
    return folder


def assert_one_line(error, disk):
    (line,) = [line for line in error.splitlines() if "No space left on device" in line]
    assert str(disk.path) in line
    assert "Traceback" not in error


@pytest.mark.parametrize("kilobytes", [0, 8, 100])
@pytest.mark.parametrize("exchange", ["files", "runner"])
def test_a_job_on_a_full_disk_leaves_no_dataset_and_works_with_room(small_disk, leaf, capsys, kilobytes, exchange):
    output = small_disk.path / "clients"
    command = ["femnist", "--input", str(leaf), "--output", str(output), "--exchange", exchange, "--num_shards", "2"]
    command += ["--input_shape", "8", "8", "1", "--num_classes", "10"]
    small_disk.leave(kilobytes)
    for _ in range(2):
        assert jobs.main(command) == 2
        assert_one_line(capsys.readouterr().err, small_disk)
        assert not output.exists()
    small_disk.make_room()
    assert jobs.main(command) == 0
    assert len(ClientDataset.open(output, verify=True).client_ids) == 3
    assert sorted(path.name for path in small_disk.path.iterdir()) == [".clients.lock", "clients"]


def test_tables_on_a_full_disk_are_not_there_in_part(small_disk, capsys):
    command = ["generate-population", "--output", str(small_disk.path / "town"), "--num_people", "3000"]
    small_disk.leave(30)
    assert jobs.main(command) == 2
    assert_one_line(capsys.readouterr().err, small_disk)
    small_disk.make_room()
    # Tables that were complete are replaced with themselves.
    assert jobs.main([*command, "--overwrite"]) == 0
    assert not list((small_disk.path / "town").glob(".*"))


def settings_of(output, leaf, **others):
    settings = {
        "output": str(output),
        "data.input": str(leaf),
        "model": {"kind": "mlp", "hidden_units": [8]},
        "training.rounds": 2,
        "training.checkpoint_every": 1,
        "training.client_parallelism": "loop",
        "algorithms": {"mr_mtl": {"learning_rate": 0.1, "prox_weight": 1.0, "local_steps": 2}},
        "export.algorithm": "mr_mtl",
        "tuning": {},
        **others,
    }
    return ["--config", str(DEMO), *(f"--set={key}={json.dumps(value)}" for key, value in settings.items())]


@pytest.mark.usefixtures("one_fresh_process")
def test_each_command_of_an_experiment_works_once_there_is_room(small_disk, leaf, capsys):
    output = small_disk.path / "run"
    settings = settings_of(output, leaf)
    for command, free in (
        (["prepare"], (0, 60)),
        (["train", "--resume"], ()),
        (["evaluate"], (0, 16)),
        (["export"], (0, 30, 60)),
    ):
        for kilobytes in free:
            small_disk.leave(kilobytes)
            assert cli.main([command[0], *settings, *command[1:]]) == 2, (command, kilobytes)
            assert_one_line(capsys.readouterr().err, small_disk)
            small_disk.make_room()
        assert cli.main([command[0], *settings, *command[1:]]) == 0
        capsys.readouterr()
    (versions,) = [path for path in (output / "export").iterdir() if path.is_dir()]
    assert list(layout.published_versions(versions)) == [1]
    assert (output / "report.html").stat().st_size > 1000


def test_a_run_does_not_begin_where_the_registry_has_no_room(small_disk, leaf, tmp_path, capsys):
    output = tmp_path / "run"
    settings = settings_of(output, leaf, **{"privacy.registry": str(small_disk.path / "registry")})
    assert cli.main(["prepare", *settings]) == 0
    for kilobytes in (0, 4, 8):
        small_disk.leave(kilobytes)
        assert cli.main(["train", *settings]) == 2, kilobytes
        assert_one_line(capsys.readouterr().err, small_disk)
        charges = read_charges(output / "mr_mtl")
        assert charges is None or not charges.through_round
        small_disk.make_room()
    assert cli.main(["train", *settings]) == 0
    registry = Registry(small_disk.path / "registry")
    assert registry.find(read_charges(output / "mr_mtl").run_id).closed
    assert len(registry.entries()) == 1


def test_other_errors_of_the_system_keep_their_traceback():
    assert sentence_for_user(ConnectionRefusedError(111, "Connection refused")) is None
    assert sentence_for_user(PermissionError(13, "Permission denied", "/root/clients")) == (
        "/root/clients: Permission denied"
    )
