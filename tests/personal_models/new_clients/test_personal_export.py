"""The newest version of an export as it is added to: what must fit it, and who may come between."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence

import numpy as np
import pytest

from serving.export.exporter import export_models
from serving.export.versions import hold
from serving.models import PersonalModels
from serving.saved_model import layout
from tests.places import DEMO
from tff_pdp.errors import ConfigError, DataError, ServingError
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.model import build_model
from tff_pdp.models import dense
from tff_pdp.models.dense import build_mlp
from tff_pdp.personal_models.model_card import check_leaves_out_nobody, check_settings, exported_ids, ids_and_settings
from tff_pdp.personal_models.new_clients import version as new_versions
from tff_pdp.personal_models.new_clients.version import adding_to_export, publish_with_clients

pytestmark = pytest.mark.usefixtures("one_fresh_process")

CLIENTS = ("alice", "bob")
HYPERNETWORK = {"learning_rate": 0.3, "descriptor_size": 4, "hidden_units": [16], "head_scale": 1.0}


def config_of(folder, **overrides):
    settings = {
        "output": str(folder),
        "data.input": str(folder),
        "data.input_shape": [2],
        "data.num_classes": 3,
        "model": {"kind": "mlp", "hidden_units": [4]},
        "privacy": {"kind": "none", "unit": "silo", "batch_size": 4},
        "algorithms": {"mr_mtl": {"learning_rate": 0.5}},
        "export": {"algorithm": "mr_mtl", "model_name": "toy"},
        "tuning": {},
        **overrides,
    }
    return load_experiment(DEMO, settings)


def export_of(config, clients=CLIENTS):
    """A version as `tff-pdp export` makes it, of made-up weights: clients own heads."""
    model, exported_id = build_model(config), exported_ids(config)
    weights = [model.init(number) for number in range(1 + len(clients))]
    models = PersonalModels(
        model,
        [exported_id(client) for client in clients],
        np.arange(1, 1 + len(clients), dtype=np.int32),
        {name: array for name, array in weights[0].items() if name not in model.head},
        {name: np.stack([own[name] for own in weights]) for name in model.head},
    )
    name = config.export.algorithm
    with hold(config.export_folder) as held, new_versions.FreshProcess() as process:
        return export_models(
            held,
            models,
            model_name=config.export.model_name,
            privacy_report={"unit": "silo_example", "claim": "none", "claim_reason": "made up", "silos": []},
            model_card={"algorithm": name, "clients": len(clients), **ids_and_settings(config, exported_id)},
            process=process,
        )


def row_of(exported, value):
    return {name: np.full_like(stack[0], value) for name, stack in exported.models.stacked.items()}


def add(config, *clients, replace=False):
    with adding_to_export(config) as exported:
        rows = {exported.served_id(client): row_of(exported, 0.1) for client in clients}
        return publish_with_clients(config, exported, rows, {}, replace=replace)


def card_of(version):
    return json.loads((version / layout.MODEL_CARD_FILE).read_text())


@pytest.fixture(scope="module")
def template(tmp_path_factory, one_fresh_process):
    folder = tmp_path_factory.mktemp("template")
    export_of(config_of(folder))
    return folder


@pytest.fixture
def folder(template, tmp_path):
    """An experiment's folder with one version of two clients under hashed ids."""
    return shutil.copytree(template, tmp_path / "run")


def test_clients_are_added_and_counted(folder):
    config = config_of(folder)
    second = add(config, "carol", "dave")
    third = add(config, "bob", "carol", replace=True)
    counts = [
        [card_of(version)[key] for key in ("clients", "clients_not_in_training", "clients_fitted_after_training")]
        for version in (second, third)
    ]
    assert counts == [[4, 2, 2], [4, 2, 4]]
    assert (third.name, card_of(third)["made_from_version"]) == ("3", 2)
    with pytest.raises(ServingError, match="2 clients that were not in training, 4 fits in all"):
        check_leaves_out_nobody(config.export_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.input_scale": 5.0}, r"model\.input_scale is 5\.0, but .*/1 was made with 1\.0"),
        ({"model.hidden_units": [5]}, r"model\.hidden_units is \[5\], but .* \[4\]"),
        ({"data.num_classes": 2}, r"data\.num_classes is 2, but .* 3"),
        ({"algorithms.mr_mtl.prox_inside_clip": True}, r"algorithms\.mr_mtl\.prox_inside_clip is True, but .* False"),
        (
            {"export.algorithm": "ditto", "algorithms": {"ditto": {}}},
            r"holds models of 'mr_mtl', but export\.algorithm",
        ),
    ],
)
def test_what_decides_the_served_model_must_be_as_it_was_exported(folder, changes, message):
    config = config_of(folder, **changes)
    with pytest.raises(ConfigError, match=message), adding_to_export(config):
        pass


def test_settings_that_decide_nothing_of_the_served_model_may_change(folder):
    # The default written out, and how clients are fitted.
    config = config_of(folder, **{"model.input_scale": 1, "algorithms.mr_mtl.learning_rate": 0.1})
    with adding_to_export(config) as exported:
        assert exported.hparams["learning_rate"] == 0.1


@pytest.mark.parametrize(("key", "value"), [("descriptor_size", 5), ("hidden_units", [16, 16]), ("head_scale", 2.0)])
def test_so_must_what_a_hypernetwork_is_built_of(tmp_path, key, value):
    method = {"export.algorithm": "udp_hypernet"}
    config = config_of(tmp_path, **method, algorithms={"udp_hypernet": HYPERNETWORK})
    card = json.loads(json.dumps({"algorithm": "udp_hypernet", **ids_and_settings(config, str)}))
    check_settings(config, tmp_path / "1", card)
    changed = config_of(tmp_path, **method, algorithms={"udp_hypernet": {**HYPERNETWORK, key: value}})
    with pytest.raises(ConfigError, match=rf"algorithms\.udp_hypernet\.{key} is "):
        check_settings(changed, tmp_path / "1", card)


def test_so_must_the_method_whatever_it_is_called(tmp_path):
    own = {"export.algorithm": "mine"}
    config = config_of(tmp_path, **own, algorithms={"mine": {"kind": "mr_mtl"}})
    card = json.loads(json.dumps({"algorithm": "mine", **ids_and_settings(config, str)}))
    check_settings(config, tmp_path / "1", card)
    changed = config_of(tmp_path, **own, algorithms={"mine": {"kind": "ditto"}})
    with pytest.raises(ConfigError, match=r"algorithms\.mine\.kind is 'ditto', but .*/1 was made with 'mr_mtl'"):
        check_settings(changed, tmp_path / "1", card)


def test_cards_of_an_earlier_version_have_other_names_for_a_models_settings(tmp_path):
    config = config_of(tmp_path)
    card = json.loads(json.dumps({"algorithm": "mr_mtl", **ids_and_settings(config, str)}))
    settings, names = card["settings"], ("hidden_units", "input_shift", "input_scale")
    card["settings"] = {
        "model.name": settings.pop("model.kind"),
        **{f"model.arguments.{name}": settings.pop(f"model.{name}") for name in names},
        **{key: value for key, value in settings.items() if not key.endswith(".kind")},
    }
    check_settings(config, tmp_path / "1", card)
    changed = config_of(tmp_path, **{"model.hidden_units": [5]})
    with pytest.raises(ConfigError, match=r"model\.hidden_units is \[5\], but .* \[4\]"):
        check_settings(changed, tmp_path / "1", card)


def test_a_program_that_makes_another_function_of_the_same_weights_is_refused(folder, monkeypatch):
    def build(
        input_shape: Sequence[int],
        num_classes: int,
        hidden_units: Sequence[int] = (64,),
        *,
        input_shift: float = 0.0,
        input_scale: float = 1.0,
    ):
        return build_mlp(input_shape, num_classes, hidden_units, input_shift=input_shift, input_scale=3 * input_scale)

    monkeypatch.setattr(dense, "build_mlp", build)
    with pytest.raises(ServingError, match=r"toy/1 is the newest .* differently"), adding_to_export(config_of(folder)):
        pass


def test_the_next_version_must_answer_other_clients_as_this_one_does(folder):
    config = config_of(folder)
    with adding_to_export(config) as exported:
        changed = {name: np.concatenate([-stack[:1], stack[1:]]) for name, stack in exported.models.stacked.items()}
        lying = dataclasses.replace(exported, models=dataclasses.replace(exported.models, stacked=changed))
        with pytest.raises(ServingError, match="differently"):
            publish_with_clients(config, lying, {exported.served_id("carol"): row_of(exported, 1)}, {}, replace=False)
    assert list(layout.published_versions(config.export_folder)) == [1]


def test_nobody_comes_between_reading_and_publishing(folder):
    config = config_of(folder)
    with adding_to_export(config):
        for run in (lambda: add(config, "carol"), lambda: export_of(config)):
            with pytest.raises(DataError, match=f"process {os.getpid()} writes to "):
                run()
    assert add(config, "carol").name == "2"


def test_an_older_version_does_not_stand_in_for_a_damaged_one(folder):
    config = config_of(folder)
    vocabulary = add(config, "carol") / layout.VOCABULARY_FILE
    vocabulary.write_bytes(b"damaged")
    with pytest.raises(ServingError, match=r"toy/2 is the newest version, .*SHA-256"):
        add(config, "dave")
    assert list(layout.published_versions(config.export_folder)) == [1, 2]


def test_without_a_version_nothing_is_written(tmp_path):
    with pytest.raises(ServingError, match="run `tff-pdp export` first"), adding_to_export(config_of(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_plain_ids_may_look_like_hashes(tmp_path):
    config = config_of(tmp_path, **{"export.client_ids": "plain"})
    export_of(config, ["0123456789abcdef" * 2])
    assert add(config, "carol").name == "2"
    hashed = config_of(tmp_path)
    with pytest.raises(ConfigError, match=r"client_ids is 'hashed', but the ids in .* are plain"):
        add(hashed, "dave")


def test_a_lost_key_is_not_made_again(folder):
    config = config_of(folder)
    key = config.client_id_key.read_bytes()
    config.client_id_key.unlink()
    with pytest.raises(ServingError, match=r"client_id\.key is missing: restore this key, which hashed .*/1"):
        exported_ids(config)
    with pytest.raises(ServingError, match=r"client_id\.key is missing"):
        add(config, "carol")
    assert not config.client_id_key.exists()
    config.client_id_key.write_text("00" * 32)
    for run in (lambda: exported_ids(config), lambda: add(config, "carol")):
        with pytest.raises(ServingError, match=r"client_id\.key is not the key of the ids in .*/1"):
            run()
    config.client_id_key.write_bytes(key)
    assert exported_ids(config)("alice") in (config.export_folder / "1" / layout.VOCABULARY_FILE).read_text()
