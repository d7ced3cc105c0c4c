import math

import pytest
import yaml

from tests.places import CONFIGS
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import load_experiment


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    config = load_experiment(path)
    assert config.export.algorithm in config.algorithms
    epsilons = config.privacy.budgets.get("cycle", [math.inf])
    assert max(epsilons) <= 8


@pytest.fixture
def content():
    return yaml.safe_load((CONFIGS / "demo.yaml").read_text())


def write(tmp_path, content):
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_unknown_key_is_named_with_the_nearest_known_one(tmp_path, content):
    content["training"]["ronds"] = 3
    with pytest.raises(ConfigError, match=r"unknown key 'training.ronds'; did you mean 'rounds'"):
        load_experiment(write(tmp_path, content))


def test_missing_key_is_named(tmp_path, content):
    del content["training"]["rounds"]
    with pytest.raises(ConfigError, match=r"missing key 'training.rounds'"):
        load_experiment(write(tmp_path, content))


@pytest.mark.parametrize("value", ["many", True, 2.5, None])
def test_wrong_type_is_named(tmp_path, content, value):
    content["training"]["rounds"] = value
    with pytest.raises(ConfigError, match=r"'training.rounds' must be a int"):
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
    with pytest.raises(ConfigError, match=r"unknown key 'training.speed'"):
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
        ("training.rounds", 0, "training.rounds must be at least 1"),
        ("training.evaluate_every", 0, "training.evaluate_every must be at least 1"),
        ("training.checkpoint_every", -1, "training.checkpoint_every must be at least 1"),
        ("privacy.batch_size", 0, "privacy.batch_size must be at least 1"),
        ("privacy.generator", "aes", "privacy.generator 'aes' must be one of: philox, chacha20"),
        ("privacy.registry", "registry", "privacy.registry 'registry' must be an absolute path"),
        ("algorithms", {}, "at least one method"),
        ("algorithms", {"fed_avg": None}, "algorithms.fed_avg must be a mapping"),
        ("tuning.search", {"algorithm": "zzz", "values": {}}, "tuning.search.algorithm 'zzz' is not one of: .*mr_mtl"),
        ("tuning.search", {"algorithm": "mr_mtl", "values": {}, "runs": True}, "'tuning.search.runs' must be a float"),
        ("tuning.search", {"algorithm": "mr_mtl"}, "missing key 'tuning.search.values'"),
        ("export.algorithm", "zzz", "export.algorithm 'zzz' is not one of: .*mr_mtl"),
        ("export.model_name", "../../x", "export.model_name"),
    ],
)
def test_values_without_meaning_are_refused_by_name(tmp_path, content, key, value, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment(write(tmp_path, content), {key: value})


def test_a_search_may_be_made_of_overrides_alone(tmp_path, content):
    content["tuning"]["search"] = None
    overrides = {"tuning.search.algorithm": "mr_mtl", "tuning.search.values": {"prox_weight": [1, 2]}}
    search = load_experiment(write(tmp_path, content), overrides).tuning.search
    assert (search.algorithm, search.values, search.runs) == ("mr_mtl", {"prox_weight": [1, 2]}, "geometric")
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
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_experiment(path)
