"""The `algorithms` part of a configuration; what it becomes in training is tested with rounds."""

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.hyper_parameters import read_epochs
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm, hparam_columns
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.dense import build_mlp
from tff_pdp.processes.client_work import initial_weights
from tff_pdp.settings import parse_yaml

MODEL = build_mlp((2,), 3, (4,))
WITH_HEADS = ("dp_fed_avg_ft", "pmtl_ft", "pp_sgd", "fed_per", "fed_rep", "centaur", "dp_pfed_dsu")


def build(name, given=None, head=MODEL.head):
    return build_algorithm(name, given or {}, num_clients=4, rounds=10, head=head)


@pytest.mark.parametrize(
    ("text", "epochs"), [("epoch", 1), ("1 epoch", 1), ("1 epochs", 1), ("5 epochs", 5), ("12 epochs", 12)]
)
def test_steps_as_epochs_of_whole_batches(text, epochs):
    assert read_epochs(text) == epochs
    algorithm, settings = build("centaur", {"local_steps": text, "head_steps": 3, "adapt_steps": text})
    # With batches of 10: 3, 2, 1 and, for less than a batch, one as well.
    columns = hparam_columns(algorithm, settings, {"a": 30, "b": 29, "c": 10, "d": 4}, batch_size=10)
    np.testing.assert_array_equal(columns["local_steps"], epochs * np.array([3, 2, 1, 1]))
    np.testing.assert_array_equal(columns["adapt_steps"], epochs * np.array([3, 2, 1, 1]))
    np.testing.assert_array_equal(columns["head_steps"], [3, 3, 3, 3])
    assert {columns[name].dtype for name in ("local_steps", "adapt_steps", "head_steps")} == {np.dtype(np.int32)}
    assert columns["learning_rate"].dtype == np.float32
    np.testing.assert_array_equal(algorithm.num_gradients(columns), epochs * np.array([3, 2, 1, 1]) + 3)


@pytest.mark.parametrize(
    "text",
    ["epochs", "0 epochs", "-1 epochs", "2.5 epochs", "05 epochs", "5epochs", " epoch", "5 epochs ", "5 Epochs", ""],
)
def test_other_texts_are_no_epochs(text):
    assert read_epochs(text) is None
    with pytest.raises(ConfigError, match=r"^algorithms\.centaur\.head_steps must .*, or epochs, such as .*, not"):
        build("centaur", {"head_steps": text})


@pytest.mark.parametrize("value", [3, 3.0, None, True, ["epoch"]])
def test_what_is_no_text_is_no_epochs(value):
    assert read_epochs(value) is None


def test_only_steps_are_counted_in_epochs():
    with pytest.raises(ConfigError, match=r"^algorithms\.centaur\.learning_rate must be a number of at least 0, not"):
        build("centaur", {"learning_rate": "5 epochs"})


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True])
def test_numbers_of_steps_are_whole_and_positive(value):
    with pytest.raises(ConfigError, match=r"^algorithms\.fed_per\.adapt_steps must be a whole number"):
        build("fed_per", {"adapt_steps": value})


@pytest.mark.parametrize("given", [[15, 16], (15, 16)])
def test_a_sequence_of_whole_numbers(given):
    algorithm, settings = build("udp_hypernet", {"hidden_units": given, "descriptor_size": 7})
    parameters = algorithm.init_server(initial_weights(MODEL))["parameters"]
    assert parameters["hidden_0/kernel"].shape == (7, 15)
    assert parameters["hidden_1/kernel"].shape == (15, 16)
    assert "hidden_2/kernel" not in parameters
    # Fixed in the computation, so no hyper-parameter.
    assert "hidden_units" not in settings


def test_an_empty_sequence_is_no_hidden_layer():
    algorithm, _ = build("hypernet", {"hidden_units": []})
    assert next(iter(algorithm.init_server(initial_weights(MODEL))["parameters"])).startswith("head/")


@pytest.mark.parametrize("value", [5, "5", "[5]", [5, 0], [-1], [5.0], [True], ["5"], [[5]], None, {"a": 5}])
def test_what_is_no_sequence_of_whole_numbers(value):
    message = (
        r"algorithms\.udp_hypernet\.hidden_units(\[\d\])? must be a (list, each a )?whole number of at least 1, not "
    )
    with pytest.raises(ConfigError, match=message):
        build("udp_hypernet", {"hidden_units": value})


@pytest.mark.parametrize("name", WITH_HEADS)
def test_the_head_is_that_of_the_model(name):
    algorithm, _ = build(name)
    weights = initial_weights(MODEL)
    server = algorithm.init_server(weights)
    state = algorithm.init_client(algorithm.broadcast(server))
    kept = {key: value for part in state.values() for key, value in part.items()}
    if name in ("dp_fed_avg_ft", "pmtl_ft"):
        assert not kept
    else:
        assert set(kept) == set(MODEL.head)
    assert algorithm.adapt is not None


@pytest.mark.parametrize("name", [*WITH_HEADS, "fed_avg"])
def test_a_configuration_cannot_name_the_head(name):
    with pytest.raises(ConfigError, match=f"unknown key algorithms.{name}.head; known: ") as caught:
        build(name, {"head": ["dense_0/kernel"]})
    assert " head," not in str(caught.value)
    assert not str(caught.value).endswith(" head")


@pytest.mark.parametrize("name", sorted(ALGORITHMS.own))
def test_defaults_are_filled_in(name):
    algorithm, settings = build(name)
    assert algorithm.name == name
    assert settings == {name: one.default for name, one in algorithm.hparams.items() if not one.is_set_by_runtime}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "dp_pfed_dsu",
            {"sparsity": 0},
            "algorithms.dp_pfed_dsu.sparsity must be a number above 0 and at most 1, not 0",
        ),
        (
            "dp_pfed_dsu",
            {"sparsity": "half"},
            "dp_pfed_dsu.sparsity must be a number above 0 and at most 1, not 'half'",
        ),
        (
            "dp_pfed_dsu",
            {"mask_source": "clients"},
            "dp_pfed_dsu.mask_source must be one of client, paper_client_mask, server, not 'clients'",
        ),
        ("dp_pfed_dsu", {"mask_source": 1}, "algorithms.dp_pfed_dsu.mask_source must be one of .*, not 1"),
        ("dp_pfed_dsu", {"sparse_layers": 0}, "dp_pfed_dsu.sparse_layers must be a whole number of at least 1, not 0"),
        ("dp_pfed_dsu", {"sparse_layers": 2.0}, "sparse_layers must be a whole number of at least 1, not 2.0"),
        ("dp_pfed_dsu", {"norm_target": -1.0}, "dp_pfed_dsu.norm_target must be a number of at least 0, not -1.0"),
        ("dp_pfed_dsu", {"norm_weight": "inf"}, "dp_pfed_dsu.norm_weight must be a number of at least 0, not 'inf'"),
        ("dp_pfed_dsu", {"norm_weight": float("inf")}, "norm_weight must be a number of at least 0, not inf"),
        ("dp_pfed_dsu", {"norm_weight": float("nan")}, "norm_weight must be a number of at least 0, not nan"),
        (
            "dp_pfed_dsu",
            {"norm_wieght": 1.0},
            r"unknown key algorithms.dp_pfed_dsu.norm_wieght; did you mean norm_weigh",
        ),
        ("udp_hypernet", {"fine_tune": 1}, "algorithms.udp_hypernet.fine_tune must be true or false, not 1"),
        (
            "udp_hypernet",
            {"descriptor_size": 0},
            "udp_hypernet.descriptor_size must be a whole number of at least 1, not",
        ),
        ("centaur", {"server_optimizer": "lamb"}, "server_optimizer must be one of adam, momentum, sgd, not 'lamb'"),
        ("centaur", {"local_momentum": 1}, "local_momentum must be a number of at least 0 and below 1, not 1"),
        ("pp_sgd", {"personal_rate": -1}, "^algorithms.pp_sgd.personal_rate must be a number of at least 0, not -1"),
        ("pmtl_ft", {"prox_weight": "auto"}, "pmtl_ft.prox_weight must be a number of at least 0, not 'auto'$"),
        ("mr_mtl", {"prox_weight": "auto", "prox_inside_clip": True}, "not 'auto': with prox_inside_clip"),
        (
            "mocha",
            {"client_index": 0},
            r"^algorithms\.mocha\.client_index cannot be set, because a run computes the value: remove",
        ),
        ("fed_rep", {"server_learning_rate": 1.0}, "unknown key algorithms.fed_rep.server_learning_rate; "),
        ("centuar", {}, r"^algorithms\.centuar: unknown kind 'centuar'; did you mean centaur\?$"),
        ("mine", {"kind": "centuar"}, r"^algorithms\.mine: unknown kind 'centuar'; did you mean centaur\?$"),
        ("mine", {"kind": 3}, r"^algorithms\.mine\.kind must be text, not 3$"),
    ],
)
def test_settings_that_mean_nothing(name, given, message):
    with pytest.raises(ConfigError, match=message):
        build(name, given)


def test_whole_numbers_will_do_for_others():
    algorithm, settings = build("dp_pfed_dsu", {"sparsity": 1, "norm_weight": 0, "learning_rate": 1})
    assert settings["learning_rate"] == 1
    assert hparam_columns(algorithm, settings, {"a": 3}, 2)["learning_rate"].dtype == np.float32
    size = sum(int(tf.size(value)) for name, value in initial_weights(MODEL).items() if name not in MODEL.head)
    assert algorithm.claims.noised_size(initial_weights(MODEL)) == size


def test_numbers_that_other_readers_of_yaml_take_for_text():
    _, settings = build("pp_sgd", parse_yaml("{learning_rate: 1e-3, personal_rate: 2.5e-1}", "experiment.yaml"))
    assert (settings["learning_rate"], settings["personal_rate"]) == (1e-3, 0.25)
    with pytest.raises(ConfigError, match=r"algorithms\.pp_sgd\.learning_rate.*, not '1e-3'"):
        build("pp_sgd", parse_yaml("{learning_rate: '1e-3'}", "experiment.yaml"))
