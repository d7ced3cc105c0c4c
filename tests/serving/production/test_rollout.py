"""Rollouts on a server with TensorFlow Serving's rules about versions and labels."""

import threading
from pathlib import Path

import pytest

from serving.__main__ import COMMANDS, main
from serving.production import rollout
from serving.production.kit import write_production_kit
from serving.production.rollout import plan_rollout, roll_out
from serving.tf_serving import Latest, ServedModel, Specific, read_model_config_file
from tests.serving.production.fake_exports import write_export
from tests.serving.production.label_server import AVAILABLE, END, LabelServer, running
from tests.unrun import parse
from tff_pdp.errors import ServingError

STORED = {"toy": (1, 2, 3), "other": (1,)}


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(rollout, "_POLL_SECONDS", 0.02)
    for name, versions in STORED.items():
        for version in versions:
            write_export(tmp_path / "models" / name, version)
    write_production_kit([tmp_path / "models"], tmp_path / "kit")
    return tmp_path


@pytest.fixture
def roll(models):
    """Rolls the model `toy` out."""

    def call(address: str, **options):
        return roll_out(models / "kit" / "models.config", models / "models" / "toy", "toy", address=address, **options)

    return call


def _toy(policy, **labels) -> ServedModel:
    return ServedModel("toy", Path("/models/toy"), policy, labels)


def test_the_plan_loads_before_it_labels():
    other = ServedModel("other", Path("/models/other"))
    toy = _toy(Specific((1, 2)), stable=1, canary=2)
    plan = plan_rollout([other, toy], "toy", 2, 3)
    assert plan.loading([]) == [other, _toy(Specific((1, 2, 3)), stable=1, canary=2)]
    assert plan.before == [other, toy]
    assert plan.final == [other, _toy(Specific((2, 3)), stable=2, canary=3)]
    promotion = plan_rollout([other, toy], "toy", None)
    assert promotion.final[1] == _toy(Specific((2,)), stable=2)
    with pytest.raises(ServingError, match="has no canary"):
        plan_rollout([other, toy], "other", None)
    with pytest.raises(ServingError, match="'digits' is not in the list of other, toy"):
        plan_rollout([other, toy], "digits", 1)


@pytest.mark.parametrize("policy", [Latest(2), Latest(None)])
def test_what_answers_meanwhile_stays_loaded(policy):
    plan = plan_rollout([_toy(policy, stable=3)], "toy", 6)
    # What the server has loaded, and what a label names whether it is loaded or not.
    assert plan.loading([4, 5]) == [_toy(Specific((3, 4, 5, 6)), stable=3)]


def test_labels_of_other_names_stay():
    before = _toy(Specific((3, 4, 9)), stable=3, canary=4, audited=9)
    plan = plan_rollout([before], "toy", None)
    assert plan.final == [_toy(Specific((4, 9)), stable=4, audited=9)]
    assert plan.versions == (4, 9)


def test_a_canary_and_its_promotion_on_a_running_server(models, roll):
    service = LabelServer(STORED, poll_seconds=0.05)
    with running(service) as address:
        roll(address, stable=1, canary=2)
        assert service.labels["toy"] == {"stable": 1, "canary": 2}
        roll(address)
        assert service.labels["toy"] == {"stable": 2}
        roll(address, stable=3)
        _wait_for(lambda: service.states["toy"] == {1: END, 2: END, 3: AVAILABLE})
    assert service.labels["toy"] == {"stable": 3}
    assert service.states["other"] == {1: AVAILABLE}
    # The version that answered at first is kept until others can.
    lists = [one["toy"] for one in service.lists]
    assert lists[0] == [1, 2, 3]
    assert lists[1::2] == [[1, 2], [2], [3]]
    other, toy = read_model_config_file(models / "kit" / "models.config")
    assert (other.policy, toy.policy, toy.labels) == (Latest(1), Specific((3,)), {"stable": 3})


def _wait_for(condition):
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("in vain")


def test_a_version_that_does_not_load_changes_nothing(models, roll):
    config_file = models / "kit" / "models.config"
    before = config_file.read_text()
    service = LabelServer(STORED, broken=[2], poll_seconds=0.05)
    with running(service) as address:
        reason = r"cannot load version 2 of 'toy': no such file\. The old list was sent back: versions, labels"
        with pytest.raises(ServingError, match=reason):
            roll(address, stable=1, canary=2)
        # The newest again, as the old list has no versions.
        assert service.lists[-1]["toy"] == []
        _wait_for(lambda: service.states["toy"] == {1: END, 2: END, 3: AVAILABLE})
        assert service.labels["toy"] == {}
        assert config_file.read_text() == before
        roll(address, stable=1)
        with pytest.raises(ServingError, match=r"cannot load version 2"):
            roll(address, stable=1, canary=2)
        assert service.labels["toy"] == {"stable": 1}
        assert service.states["toy"][1] == AVAILABLE


def _with_a_failure(version: int, **options) -> LabelServer:
    """A server on which a version failed earlier, which it says until it looks at its disk again."""
    service = LabelServer(STORED, **options)
    service.states["toy"][version] = END
    service.failed.add(("toy", version))
    return service


def test_a_version_whose_files_were_repaired_is_loaded(roll):
    service = _with_a_failure(2, poll_seconds=0.2)
    with running(service) as address:
        roll(address, stable=3, canary=2)
    assert service.labels["toy"] == {"stable": 3, "canary": 2}


def test_a_version_that_fails_again_ends_the_wait(roll):
    service = _with_a_failure(2, poll_seconds=0.2, broken=[2])
    with running(service) as address, pytest.raises(ServingError, match="cannot load version 2"):
        # It is seen to load in between, so that its failure counts before every server has looked.
        roll(address, stable=3, canary=2, timeout_seconds=rollout._ACTS_WITHIN_SECONDS - 1)


def test_a_version_that_failed_and_is_not_tried_again_ends_the_wait(roll, monkeypatch):
    monkeypatch.setattr(rollout, "_ACTS_WITHIN_SECONDS", 0.2)
    with running(_with_a_failure(3)) as address, pytest.raises(ServingError, match="cannot load version 3"):
        roll(address, stable=3, timeout_seconds=30)


def test_a_server_that_is_too_slow_or_refuses(models, roll):
    service = LabelServer(STORED, load_seconds=60)
    with running(service) as address:
        with pytest.raises(ServingError, match=r"did not load version 1, 2 of 'toy' in time\. The old list was"):
            roll(address, stable=1, canary=2, timeout_seconds=0.5)
        service.states["toy"] = {}
        roll_out(models / "kit" / "models.config", models / "models" / "toy", "toy", stable=1)
        refused = "answered FAILED_PRECONDITION: version 1 is not currently available"
        with pytest.raises(ServingError, match=f"{refused}. The old list could not be sent back either: .*{refused}"):
            roll(address, stable=2)


def test_ctrl_c_sends_the_list_of_before_back(roll, monkeypatch):
    service = LabelServer(STORED, load_seconds=60)

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout.time, "sleep", interrupt)
    with running(service) as address:
        with pytest.raises(KeyboardInterrupt):
            roll(address, stable=1)
        assert [one["toy"] for one in service.lists] == [[1, 3], []]


def test_a_file_that_cannot_be_written_is_told(roll, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(rollout, "write_model_config_file", full)
    with running(LabelServer(STORED)) as address:
        message = rf"models.config cannot be written: No space left.* {address} serves the new list already"
        with pytest.raises(ServingError, match=message):
            roll(address, stable=3)


def test_versions_must_be_on_disk(models):
    with pytest.raises(ServingError, match="holds no complete version 9; it has 1, 2, 3"):
        roll_out(models / "kit" / "models.config", models / "models" / "toy", "toy", stable=9)
    with pytest.raises(ServingError, match="not a readable model config"):
        roll_out(models / "absent", models / "models" / "toy", "toy", stable=1)


def test_the_command_without_a_server_writes_the_file(models, capsys):
    config_file = models / "kit" / "models.config"
    common = ["rollout", str(models / "models" / "toy"), "--model-name", "toy", "--config", str(config_file)]
    assert main([*common, "--stable", "1", "--canary", "2"]) == 0
    assert "toy: stable 1, canary 2 (the file only" in capsys.readouterr().out
    assert main([*common, "--promote"]) == 0
    assert read_model_config_file(config_file)[1].labels == {"stable": 2}
    with pytest.raises(ServingError, match="--promote makes the canary stable"):
        parse(COMMANDS, [*common, "--promote", "--canary", "3"]).run()
