import pytest
import yaml

from tests.places import CONFIGS
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import load_experiment
from tff_pdp.privacy.accounting.budgets import Cycled


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    config = load_experiment(path)
    assert config.export.algorithm in config.algorithms
    assert isinstance(config.privacy.budgets, Cycled)
    assert max(config.privacy.budgets.epsilons) <= 8


def test_a_shipped_experiment_has_a_name_unless_a_file_has_it(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_experiment("demo") == load_experiment(CONFIGS / "demo.yaml")
    assert load_experiment("reproduce/school").title == load_experiment(CONFIGS / "reproduce" / "school.yaml").title
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_text(yaml.safe_dump(content | {"title": "my own"}))
    assert load_experiment("demo").title == "my own"
    with pytest.raises(ConfigError, match=r"^gone: cannot read the file"):
        load_experiment("gone")


VALUES = {"prox_weight": [1, 2]}


@pytest.fixture
def content():
    return yaml.safe_load((CONFIGS / "demo.yaml").read_text())


def write(tmp_path, content):
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_unknown_key_is_named_with_the_nearest_known_one(tmp_path, content):
    content["training"]["ronds"] = 3
    with pytest.raises(ConfigError, match=r"experiment\.yaml: unknown key training\.ronds; did you mean rounds\?$"):
        load_experiment(write(tmp_path, content))


def test_missing_key_is_named(tmp_path, content):
    del content["training"]["rounds"]
    with pytest.raises(
        ConfigError, match=r"experiment\.yaml: missing key training\.rounds: a whole number of at least 1$"
    ):
        load_experiment(write(tmp_path, content))


@pytest.mark.parametrize("value", ["many", True, 2.5, None])
def test_wrong_type_is_named(tmp_path, content, value):
    content["training"]["rounds"] = value
    with pytest.raises(ConfigError, match=rf"training\.rounds must be a whole number of at least 1, not {value!r}$"):
        load_experiment(write(tmp_path, content))


def test_not_yaml_and_not_there(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_experiment(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_experiment(tmp_path / "absent.yaml")


def test_overrides_replace_values_by_dotted_key(tmp_path, content):
    config = load_experiment(write(tmp_path, content), {"training.rounds": 7, "output": "elsewhere"})
    assert config.training.rounds == 7
    assert config.output == "elsewhere"
    with pytest.raises(ConfigError, match=r"unknown key training\.speed; known: "):
        load_experiment(write(tmp_path, content), {"training.speed": 1})


def test_the_hash_follows_what_decides_the_bits(tmp_path, content):
    path = write(tmp_path, content)
    base = load_experiment(path).hash("mr_mtl", "data")
    assert load_experiment(path, {"training.checkpoint_every": 3, "output": "x"}).hash("mr_mtl", "data") == base
    assert load_experiment(path, {"privacy.clip_norm": 2.0}).hash("mr_mtl", "data") != base
    assert load_experiment(path).hash("mr_mtl", "other data") != base
    assert load_experiment(path, {"privacy.generator": "philox"}).hash("mr_mtl", "data") == base
    assert load_experiment(path, {"privacy.generator": "chacha20"}).hash("mr_mtl", "data") != base


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.rounds", 0, "training.rounds must be a whole number of at least 1, not 0"),
        ("training.evaluate_every", 0, "training.evaluate_every must be a whole number of at least 1, not 0"),
        ("training.checkpoint_every", -1, "training.checkpoint_every must be a whole number of at least 1, not -1"),
        ("training.device", "tpu", r"training.device must be text like .*auto\|cpu\|gpu.*, not 'tpu'"),
        ("privacy.batch_size", 0, "privacy.batch_size must be a whole number of at least 1, not 0"),
        ("privacy.generator", "aes", "privacy.generator must be one of chacha20, philox, not 'aes'"),
        ("privacy.registry", "registry", "privacy: registry 'registry' must be an absolute path"),
        ("algorithms", {}, "algorithms must be a mapping from names, at least 1, each to .*, not {}"),
        ("algorithms", {"fed_avg": None}, "algorithms.fed_avg must be a mapping from names to values .*, not None"),
        (
            "tuning.search",
            {"algorithm": "zzz", "values": VALUES},
            "tuning.search.algorithm 'zzz' must be one of fed_avg, local_only, mr_mtl",
        ),
        ("tuning.search", {"algorithm": "mr_mtl", "values": {}}, "tuning.search.values must be a .*, at least 1, "),
        (
            "tuning.search",
            {"algorithm": "mr_mtl", "values": {"prox_weight": []}},
            "tuning.search.values.prox_weight must be a list of at least 1, each a number, not",
        ),
        (
            "tuning.search",
            {"algorithm": "mr_mtl", "values": VALUES, "runs": True},
            "tuning.search.runs must be one of fixed, geometric, .*, or a number of at least 0, not True",
        ),
        ("tuning.search", {"algorithm": "mr_mtl"}, "missing key tuning.search.values"),
        ("export.algorithm", "zzz", "export.algorithm 'zzz' must be one of fed_avg, local_only, mr_mtl"),
        ("export.model_name", "../../x", r"export.model_name must be text like .*A-Za-z0-9.*, not '../../x'"),
    ],
)
def test_values_without_meaning_are_refused_by_name(tmp_path, content, key, value, message):
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: {message}") as caught:
        load_experiment(write(tmp_path, content), {key: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.source": "leaf"}, "the key data.source is now data.kind"),
        (
            {"data.arguments": {"size": 3}},
            "the key data.arguments is now the options of data.kind, which stand in data",
        ),
        ({"model.name": "linear"}, "the key model.name is now model.kind"),
        ({"model.arguments": {"a": 3}}, "the key model.arguments is now the options of model.kind, which stand in mod"),
        ({"privacy.plan": "user"}, "the key privacy.plan is now privacy.kind"),
        (
            {"privacy.budgets.cycle": [1, 2]},
            "the key privacy.budgets.cycle is now privacy.budgets with kind cycled, and epsilons",
        ),
        (
            {"privacy.budgets": {"epsilon": 1, "delta": 1e-5}},
            "missing key privacy.budgets.kind: budgets with epsilon are of kind one_for_all",
        ),
        (
            {"privacy.budgets": {"silos": {}}},
            "missing key privacy.budgets.kind: budgets with silos are of kind by_silo",
        ),
        (
            {"privacy.budgets": {"file": "a.csv"}},
            "missing key privacy.budgets.kind: budgets with file are of kind from_file",
        ),
        (
            {"privacy.budgets": {"distribution": {}}},
            "missing key privacy.budgets.kind: budgets with distribution are of kind drawn",
        ),
    ],
)
def test_keys_of_an_earlier_version_are_named_with_what_replaces_them(tmp_path, content, changes, message):
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: {message}"):
        load_experiment(write(tmp_path, content), changes)


@pytest.mark.parametrize(
    ("section", "kinds"),
    [("data", "leaf, .*, simulated_outbreak"), ("privacy", "silo_example, contact_graph, user, none")],
)
def test_a_kind_must_be_said_and_known(tmp_path, content, section, kinds):
    path = write(tmp_path, content)
    with pytest.raises(
        ConfigError, match=rf"experiment\.yaml: missing key {section}\.kind: one of {kinds}, or module:n"
    ):
        load_experiment(path, {f"{section}.kind": None})
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: {section}\.kind: unknown kind 'zzz'; known: "):
        load_experiment(path, {f"{section}.kind": "zzz"})
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: {section}\.kind must be text that is not empty, not 3$"):
        load_experiment(path, {f"{section}.kind": 3})
    for other in ("pathlib:Path", "os:getcwd"):
        with pytest.raises(
            ConfigError, match=rf"experiment\.yaml: {section}\.kind: {other} is not a subclass of \w+Settings"
        ):
            load_experiment(path, {f"{section}.kind": other})
    with pytest.raises(ConfigError, match=rf"experiment\.yaml: missing key {section}: a mapping$"):
        load_experiment(path, {section: None})


def test_what_is_written_is_read_again_with_defaults_filled_in(content, tmp_path):
    config = load_experiment(write(tmp_path, content))
    plain = config.to_dict()
    assert plain["data"]["kind"] == "leaf" and plain["data"]["validation_fraction"] == 0.2
    assert plain["privacy"]["budgets"] == {"kind": "cycled", "epsilons": [2, 4, 6, 8], "delta": 1e-4, "level": "own"}
    assert load_experiment(write(tmp_path, plain)) == config


def test_a_search_may_be_made_of_overrides_alone(tmp_path, content):
    content["tuning"]["search"] = None
    overrides = {"tuning.search.algorithm": "mr_mtl", "tuning.search.values": {"prox_weight": [1, 2]}}
    search = load_experiment(write(tmp_path, content), overrides).tuning.search
    assert (search.algorithm, search.values, search.runs) == ("mr_mtl", {"prox_weight": (1, 2)}, "geometric")
    assert load_experiment(write(tmp_path, content), {**overrides, "tuning.search.runs": 2}).tuning.search.runs == 2.0
    del content["tuning"]
    assert load_experiment(write(tmp_path, content), overrides).tuning.search == search


@pytest.mark.parametrize("text", ["", "just words", "- a\n- list", "title: a\ntitle: b", "\x00"])
def test_files_that_are_no_mapping_are_refused(tmp_path, text):
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"experiment.yaml"):
        load_experiment(path)


def test_a_repeated_key_is_refused_wherever_it_stands(tmp_path, content):
    path = write(tmp_path, content)
    path.write_text(path.read_text().replace("rounds: 150", "rounds: 150\n  rounds: 3"))
    with pytest.raises(ConfigError, match="'rounds' occurs more than once"):
        load_experiment(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"experiment\.yaml: not UTF-8 text \(byte 0\)"):
        load_experiment(path)
