"""How gradients enter an upload, and which coordinates of a model stay quiet."""

import math

import numpy as np
import pytest

from tff_pdp.audit.readings import frame_of
from tff_pdp.audit.uploads import noise_gain, quiet_coordinates, recording
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.models.dense import build_linear, build_mlp
from tff_pdp.processes.client_work import initial_weights

# With 12 weights and 14 gradients or more, gradients are followed in several runs.
MODEL = build_linear((3,), 3)
RATE, STEPS, PULL = 0.25, 14, 0.5


def gain_of(name, model=MODEL, **settings):
    algorithm, hparams = build_algorithm(name, settings, num_clients=3, rounds=4, head=model.head)
    if "client_index" in algorithm.hparams:
        hparams = {**hparams, "client_index": 1}
    return noise_gain(algorithm, model, initial_weights(model), hparams)


@pytest.mark.parametrize("name", ["fed_avg", "ditto", "finetune", "apfl", "pfa", "scaffold"])
def test_plain_steps_add_up(name):
    _, start, gain, count = gain_of(name, learning_rate=RATE, local_steps=STEPS)
    assert gain == pytest.approx(RATE * math.sqrt(STEPS), rel=1e-5)
    # Gradients of a client's own model have no effect on the upload.
    assert count == STEPS
    assert {value.shape for value in start.values()} == {(3, 3), (3,)}


@pytest.mark.parametrize("name", ["mr_mtl", "mocha", "fed_prox"])
def test_a_pull_shortens_earlier_steps(name):
    release, start, gain, _ = gain_of(name, learning_rate=RATE, local_steps=STEPS, prox_weight=PULL)
    # Mocha's relations are the identity in the first round, so that other clients do not pull, and the pull goes to 0.
    factors = [RATE * (1 - RATE * PULL) ** later for later in range(STEPS)]
    assert gain == pytest.approx(math.sqrt(np.sum(np.square(factors))), rel=1e-5)
    assert release == {"mr_mtl": "movement", "mocha": "row", "fed_prox": "update"}[name]
    assert not any(value.any() for value in start.values())


def test_an_upload_may_be_divided():
    *_, gain, count = gain_of("fed_nova", learning_rate=RATE, local_steps=STEPS)
    assert gain == pytest.approx(RATE / math.sqrt(STEPS), rel=1e-5)
    assert count == STEPS


def test_an_upload_may_be_a_mean_of_gradients_at_the_end_of_the_steps():
    *_, gain, count = gain_of("fed_meta", learning_rate=RATE, local_steps=STEPS, query_steps=4)
    assert gain == pytest.approx(0.5, rel=1e-5)
    assert count == 4


def test_a_release_of_weights_is_read_against_the_start():
    model = build_mlp((3,), 3, (2,))
    release, start, gain, _ = gain_of("mocha", model, learning_rate=RATE, local_steps=3, prox_weight=0.0)
    assert release == "row"
    np.testing.assert_array_equal(start["dense_0/kernel"], model.init(0)["dense_0/kernel"])
    assert gain == pytest.approx(RATE * math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("mr_mtl", {"prox_inside_clip": True}, "the clip shortens a pull"),
        ("mr_mtl", {"learning_rate": 0.0}, "no gradient enters an upload"),
        ("ifca", {}, "no release consists of weights"),
    ],
)
def test_uploads_that_do_not_show_the_noise_of_steps_are_refused(name, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        gain_of(name, **settings)


def test_the_server_of_a_recording_keeps_rows_and_leaves_the_state():
    algorithm, _ = build_algorithm("fed_nova", {}, num_clients=3, rounds=4)
    recorder = recording(algorithm, MODEL, 3)
    state = recorder.init_server(initial_weights(MODEL))
    assert recorder.released == {"direction": "rows"} and not recorder.public
    rows = state["rows"]["direction"]["rows"]
    assert {name: tuple(value.shape) for name, value in rows.items()} == {
        "dense_0/kernel": (3, 3, 3),
        "dense_0/bias": (3, 3),
    }
    found = {"direction": {"rows": rows, "present": np.ones(3)}}
    after = recorder.server_update(state, found)
    assert after["rows"]["direction"] is found["direction"]
    assert after["algorithm"] is state["algorithm"]
    assert recorder.broadcast(state).keys() == algorithm.broadcast(state["algorithm"]).keys()


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_rows_of_the_frame_are_quiet_in_a_dense_first_layer(hidden):
    frame = frame_of((6, 5), 1)
    found = quiet_coordinates(build_mlp((6, 5), 3, hidden), frame)
    assert list(found) == ["dense_0/kernel"]
    np.testing.assert_array_equal(found["dense_0/kernel"], np.repeat(frame.reshape(-1, 1), (hidden or (3,))[0], axis=1))


def test_nothing_is_quiet_if_inputs_are_shifted():
    assert quiet_coordinates(build_linear((6, 5), 3, input_shift=-0.5), frame_of((6, 5), 1)) == {}
