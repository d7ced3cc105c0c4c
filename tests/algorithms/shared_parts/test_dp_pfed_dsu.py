import collections
import math
from typing import get_args

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA
from tests.algorithms.two_part_support import hparams
from tests.rounding import gamma
from tff_pdp.algorithms.shared_parts.centaur import build_centaur
from tff_pdp.algorithms.shared_parts.dp_pfed_dsu import MaskSource, build_dp_pfed_dsu
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm

MASK_SOURCES = get_args(MaskSource)
HEAD = ("head/kernel",)
KERNEL = [[1.0, -3.0], [0.5, 2.0]]
# What half of the kernel's weights is.
MASK = np.array([[0, 1], [0, 1]])


def weights(kernel=KERNEL, bias=(4.0, 5.0), head=(6.0, 7.0)):
    named = {"kernel": kernel, "bias": bias, "head/kernel": [head]}
    return collections.OrderedDict((name, tf.constant(value, tf.float32)) for name, value in named.items())


def build(**given):
    return build_dp_pfed_dsu(head=HEAD, **{"sparsity": 0.5, "norm_weight": 0.0, **given})


def scripted(gradients, seen=None):
    """Gradients that were written down, of all weights: those of the round's first, of its second and so on.

    What the gradients are taken at is added to `seen`, by names of weights, for steps that move anything.
    """
    filled = [{**tf.nest.map_structure(np.zeros_like, arrays(weights())), **one} for one in gradients]

    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        def note(size, *tensors):
            if seen is not None and size:
                seen.append({name: tensor.copy() for name, tensor in zip(current, tensors, strict=True)})
            return size

        noted = tf.numpy_function(note, [scale, *current.values()], tf.float32)
        noted.set_shape([])
        names = list(current if trainable is None else trainable)
        return collections.OrderedDict(
            (name, noted * tf.constant(np.stack([one[name] for one in filled]), tf.float32)[index]) for name in names
        )

    return grad_fn


def arrays(named):
    return {name: np.array(value, np.float32) for name, value in named.items()}


def update(algorithm, grad_fn, start=None, head=(6.0, 7.0), **given):
    message = {"weights": weights() if start is None else start}
    state = {"head": {"head/kernel": tf.constant([head], tf.float32)}}
    given = {"learning_rate": 1.0, "head_learning_rate": 1.0, "head_steps": 1, "local_steps": 2, **given}
    result = algorithm.client_update(message, state, NO_DATA, grad_fn, hparams(**given))
    assert list(result.released) == ["update"]
    return arrays(result.released["update"]), arrays(result.state["head"])


# The head's gradient; then one that makes the kernel [[10, -4], [0.5, 1.5]] where all of it can move; then none.
SCRIPT = [
    {"head/kernel": [[1.0, 2.0]]},
    {"kernel": [[-9.0, 1.0], [0.0, 0.5]], "bias": [1.0, -1.0]},
    {},
]


def test_a_mask_of_the_server_stays_for_the_round():
    seen = []
    released, head = update(build(), scripted(SCRIPT, seen))
    np.testing.assert_array_equal(head["head/kernel"], [[5.0, 5.0]])
    # The head is tuned on the body as it is; the body through the mask of the round's beginning.
    np.testing.assert_array_equal(seen[0]["kernel"], KERNEL)
    np.testing.assert_array_equal(seen[1]["kernel"], [[0.0, -3.0], [0.0, 2.0]])
    np.testing.assert_array_equal(seen[2]["kernel"], [[0.0, -4.0], [0.0, 1.5]])
    # Biases and heads are not masked.
    np.testing.assert_array_equal(seen[1]["bias"], [4.0, 5.0])
    np.testing.assert_array_equal(seen[1]["head/kernel"], [[5.0, 5.0]])
    np.testing.assert_array_equal(released["kernel"], [[0.0, -1.0], [0.0, -0.5]])
    np.testing.assert_array_equal(released["bias"], [-1.0, 1.0])
    assert list(released) == ["kernel", "bias"]


def test_a_mask_of_the_client_follows_its_weights_and_releases_all():
    seen = []
    released, _ = update(build(mask_source="client"), scripted(SCRIPT, seen))
    np.testing.assert_array_equal(seen[1]["kernel"], [[0.0, -3.0], [0.0, 2.0]])
    np.testing.assert_array_equal(seen[2]["kernel"], [[10.0, -4.0], [0.0, 0.0]])
    np.testing.assert_array_equal(released["kernel"], [[9.0, -1.0], [0.0, -0.5]])
    np.testing.assert_array_equal(released["bias"], [-1.0, 1.0])


def test_the_papers_mask_is_that_of_the_final_weights():
    released, _ = update(build(mask_source="paper_client_mask"), scripted(SCRIPT))
    np.testing.assert_array_equal(released["kernel"], [[9.0, -1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(released["bias"], [-1.0, 1.0])


@pytest.mark.parametrize("mask_source", ["client", "paper_client_mask"])
def test_masked_gradients_freeze_what_the_mask_leaves_out(mask_source):
    seen = []
    released, _ = update(build(mask_source=mask_source, mask_gradient="masked"), scripted(SCRIPT, seen))
    np.testing.assert_array_equal(seen[2]["kernel"], [[0.0, -4.0], [0.0, 1.5]])
    np.testing.assert_array_equal(released["kernel"], [[0.0, -1.0], [0.0, -0.5]])
    np.testing.assert_array_equal(released["bias"], [-1.0, 1.0])


def test_what_a_mask_of_the_server_leaves_out_never_shows():
    """Whether it moves or not: the mask does not follow it, and it is not released."""
    for_both = [update(build(mask_gradient=kind), scripted(SCRIPT)) for kind in ("straight_through", "masked")]
    np.testing.assert_equal(*for_both)


@pytest.mark.parametrize("mask_gradient", ["straight_through", "masked"])
def test_momentum_gets_past_no_mask(mask_gradient):
    released, _ = update(build(mask_gradient=mask_gradient, local_momentum=0.5), scripted(SCRIPT))
    np.testing.assert_array_equal(released["kernel"], 1.5 * np.array([[0.0, -1.0], [0.0, -0.5]]))


def test_the_mask_of_the_server_is_a_function_of_the_broadcast_alone():
    """Whatever clients' data, heads, rates and steps are."""
    rng = np.random.default_rng(0)
    start = weights(rng.normal(size=(6, 7)), np.zeros(2))
    kernel = np.abs(start["kernel"])
    mask = kernel > np.sort(kernel, axis=None)[-10]
    algorithm = build(sparsity=9 / 42)
    supports = []
    for client in range(4):
        gradients = [{"kernel": rng.normal(size=(6, 7)) * 10**client} for _ in range(4)]
        filled = [{"bias": np.zeros(2), "head/kernel": rng.normal(size=(1, 2)), **one} for one in gradients]
        released, _ = update(
            algorithm,
            scripted(filled),
            start,
            head=tuple(rng.normal(size=2)),
            learning_rate=0.3 * client + 0.1,
            local_steps=(client % 2 + 1, 2),
        )
        supports.append(released["kernel"] != 0)
    for support in supports:
        np.testing.assert_array_equal(support, mask)


def test_the_server_goes_on_with_what_is_inside_its_mask():
    """Noise arrives on all values of the mean."""
    algorithm = build()
    state = algorithm.init_server(weights())
    noised = {"kernel": tf.constant([[100.0, 1.0], [100.0, -1.75]]), "bias": tf.constant([1.0, 2.0])}
    state = algorithm.server_update(state, {"update": noised})
    np.testing.assert_array_equal(state["weights"]["kernel"], [[1.0, -2.0], [0.5, 0.25]])
    np.testing.assert_array_equal(state["weights"]["bias"], [5.0, 7.0])
    np.testing.assert_array_equal(state["weights"]["head/kernel"], [[6.0, 7.0]])
    # The next round's mask is that of the new weights, at the server as at clients.
    released, _ = update(algorithm, scripted([{}, {"kernel": -np.ones([2, 2])}]), state["weights"], local_steps=1)
    np.testing.assert_array_equal(released["kernel"], [[1.0, 1.0], [0.0, 0.0]])
    state = algorithm.server_update(state, {"update": {**noised, "kernel": tf.ones([2, 2])}})
    np.testing.assert_array_equal(state["weights"]["kernel"], [[2.0, -1.0], [0.5, 0.25]])


@pytest.mark.parametrize("mask_source", ["client", "paper_client_mask"])
def test_without_a_mask_of_its_own_the_server_adds_all_of_the_mean(mask_source):
    algorithm = build(mask_source=mask_source)
    state = algorithm.init_server(weights())
    update_of_all = {"kernel": tf.ones([2, 2]), "bias": tf.ones([2])}
    state = algorithm.server_update(state, {"update": update_of_all})
    np.testing.assert_array_equal(state["weights"]["kernel"], np.array(KERNEL) + 1)


def layers(*shapes):
    rng = np.random.default_rng(0)
    named = collections.OrderedDict()
    # Not in the order of the alphabet.
    for name, shape in zip("zamy", shapes, strict=False):
        named[f"{name}/kernel"] = tf.constant(rng.normal(size=shape), tf.float32)
        named[f"{name}/bias"] = tf.zeros([shape[-1]])
    named["head/kernel"] = tf.constant(rng.normal(size=(2, 2)), tf.float32)
    return named


@pytest.mark.parametrize(
    ("sparse_layers", "kernels"), [(1, 20 + 12 + 2), (2, 20 + 3 + 2), (3, 5 + 3 + 2), (4, 5 + 3 + 2)]
)
def test_noise_changes_the_masked_share_of_the_last_layers_and_all_of_the_rest(sparse_layers, kernels):
    start = layers((5, 4), (4, 3), (3, 2))
    algorithm = build(sparsity=0.25, sparse_layers=sparse_layers)
    assert algorithm.claims.noised_size(start) == kernels + (4 + 3 + 2)
    released, _ = update(
        algorithm,
        lambda current, data, index, scale, pull, trainable: {
            name: scale * tf.ones_like(current[name]) for name in trainable or current
        },
        start,
    )
    assert sum(int((value != 0).sum()) for value in released.values()) == algorithm.claims.noised_size(start)


@pytest.mark.parametrize("mask_source", ["client", "paper_client_mask"])
def test_a_mask_that_follows_the_weights_finds_the_last_layers(mask_source):
    """In every step of the loop, whatever order names may have there."""
    start = layers((5, 4), (4, 3), (3, 2))
    seen = []

    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        def note(size, *tensors):
            if size:
                seen.append([int((tensor != 0).sum()) for tensor in tensors])
            return size

        kernels = [current[f"{name}/kernel"] for name in "zam"]
        noted = tf.numpy_function(note, [scale, *kernels], tf.float32)
        noted.set_shape([])
        return {name: noted * 0.1 * tf.ones_like(current[name]) for name in trainable or current}

    algorithm = build(sparsity=0.25, sparse_layers=2, mask_source=mask_source)
    released, _ = update(algorithm, grad_fn, start, local_steps=(3, 4))
    assert seen == [[20, 12, 6]] + [[20, 3, 2]] * 3
    if mask_source == "paper_client_mask":
        assert [int((released[f"{name}/kernel"] != 0).sum()) for name in "zam"] == [20, 3, 2]


# Of the kernel and the bias, moved before the penalty is asked for.
MOVED = {"kernel": np.array([[0.25, 3.0], [-0.5, 1.0]]), "bias": np.array([2.0, -1.0])}
# Within the mask: sqrt(9 + 1 + 4 + 1).
NORM = math.sqrt(15)
RATE = 0.5
# Both steps round a weight of up to 30 + 3, and the release is their difference, of which the rate makes more; what the
# penalty itself rounds is little beside that.
PENALTY_ROUNDING = gamma(3) * 33 / RATE


def penalty_gradient(moved=MOVED, norm_weight=0.4, **given):
    """What the penalty adds to the gradient of the second step, after a first one that has moved by `moved`."""
    gradients = [{}, {name: -value / RATE for name, value in moved.items()}, {}]
    # All of it is released, and the mask is the same before and after.
    algorithm = build(mask_source="client", norm_weight=norm_weight, **given)
    released, _ = update(algorithm, scripted(gradients), weights(np.array(KERNEL) * 10), learning_rate=RATE)
    return {name: (moved[name] - released[name]) / RATE for name in moved}


def penalty(moved, norm_weight, norm_target, kind):
    norm = math.sqrt(np.square(moved["kernel"] * MASK).sum() + np.square(moved["bias"]).sum())
    excess = norm - norm_target
    return 0.5 * norm_weight * (abs(excess) if kind == "absolute" else max(excess, 0.0))


@pytest.mark.parametrize("kind", ["absolute", "hinge"])
@pytest.mark.parametrize("target", [0.01, 1.0, 3.8, 3.95, 100.0])
def test_the_penaltys_gradient_against_finite_differences(kind, target):
    found = penalty_gradient(norm_target=target, norm_penalty=kind)
    step = 1e-5
    for name, value in MOVED.items():
        expected = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                changed = {**MOVED, name: value.copy()}
                changed[name][place] += sign * step
                ends.append(penalty(changed, 0.4, target, kind))
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        # Differences in float64 err by some 1e-10.
        np.testing.assert_allclose(found[name], expected, atol=PENALTY_ROUNDING)
    length = math.sqrt(sum(np.square(value).sum() for value in found.values()))
    of_six = PENALTY_ROUNDING * math.sqrt(6)
    assert length == pytest.approx(0.0 if kind == "hinge" and target > NORM else 0.2, abs=of_six)


@pytest.mark.parametrize("kind", ["absolute", "hinge"])
def test_a_body_that_has_not_moved_is_not_pushed_anywhere(kind):
    nothing = {name: np.zeros_like(value) for name, value in MOVED.items()}
    for value in penalty_gradient(nothing, norm_penalty=kind, norm_target=3.0).values():
        np.testing.assert_array_equal(value, np.zeros_like(value))


def test_the_penalty_draws_a_short_update_out_and_a_long_one_in():
    """To the target norm, from both sides."""
    short = {name: 0.5 * value for name, value in MOVED.items()}
    for moved, expected in ((MOVED, 1.0), (short, -1.0)):
        found = penalty_gradient(moved, norm_target=3.0)
        assert np.sign(found["bias"][0]) == expected
    for value in penalty_gradient(short, norm_target=3.0, norm_penalty="hinge").values():
        np.testing.assert_array_equal(value, np.zeros_like(value))


def test_the_penalty_does_not_count_what_the_mask_leaves_out():
    far = {**MOVED, "kernel": np.array([[4.0, 3.0], [-4.0, 1.0]])}
    found, expected = penalty_gradient(far, norm_target=3.0), penalty_gradient(norm_target=3.0)
    np.testing.assert_allclose(found["kernel"], expected["kernel"], atol=2 * PENALTY_ROUNDING)
    np.testing.assert_array_equal(found["kernel"] * (1 - MASK), np.zeros([2, 2]))


def test_a_penalty_with_a_mask_of_the_server():
    # One step to d = (-1, -0.5; 1, -1), of norm sqrt(3.25); then against d by 0.5 * 0.4 / norm.
    algorithm = build(norm_weight=0.4, norm_target=1.0)
    released, _ = update(algorithm, scripted([*SCRIPT[:1], {**SCRIPT[1], "bias": [-1.0, 1.0]}, {}]))
    factor = 1 - 0.2 / math.sqrt(3.25)
    # Two steps and a difference of weights of up to 5 + 1.
    bound = gamma(3) * 6
    np.testing.assert_allclose(released["kernel"], factor * np.array([[0.0, -1.0], [0.0, -0.5]]), atol=bound)
    np.testing.assert_allclose(released["bias"], factor * np.array([1.0, -1.0]), atol=bound)


@pytest.mark.parametrize("mask_source", MASK_SOURCES)
def test_with_all_weights_and_no_penalty_it_is_centaur_to_the_bit(mask_source):
    rng = np.random.default_rng(0)
    script = [{name: rng.normal(size=value.shape) for name, value in weights().items()} for _ in range(5)]
    given = {"head_steps": 2, "local_steps": (3, 5), "learning_rate": 0.123}
    dsu = build(sparsity=1.0, mask_source=mask_source, local_momentum=0.9)
    centaur = build_centaur(head=HEAD, local_momentum=0.9)
    np.testing.assert_equal(*(update(one, scripted(script), **given) for one in (dsu, centaur)))


def test_what_is_said_of_each_source_of_masks():
    server, client, paper = (build(mask_source=source) for source in MASK_SOURCES)
    assert not server.claims.unsound + client.claims.unsound
    assert not server.claims.noise_on_own_support
    assert not client.claims.noise_on_own_support
    assert paper.claims.noise_on_own_support
    assert "the client's own final weights" in paper.claims.unsound
    assert server.claims.noised_size(weights()) == 4
    # A dense release has noise everywhere.
    assert client.claims.noised_size is None
    assert paper.claims.noised_size is None
    assert build_dp_pfed_dsu(head=HEAD).claims.noised_size is not None


def test_the_personal_model_is_the_whole_body_with_the_own_head():
    algorithm = build()
    model = algorithm.personalise({"weights": weights()}, {"head": {"head/kernel": tf.constant([[1.0, 1.0]])}})
    np.testing.assert_array_equal(model["kernel"], KERNEL)
    np.testing.assert_array_equal(model["head/kernel"], [[1.0, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 0.0}, r"dp_pfed_dsu\.sparsity must be a number above 0 and at most 1, not 0\.0"),
        ({"sparsity": 1.5}, r"sparsity must be .*, not 1\.5"),
        ({"sparsity": math.nan}, "sparsity must be .*, not nan"),
        ({"sparse_layers": 0}, "sparse_layers must be a whole number of at least 1, not 0"),
        ({"mask_source": "clients"}, "mask_source must be one of client, paper_client_mask, server, not 'clients'"),
        ({"mask_gradient": "none"}, "mask_gradient must be one of masked, straight_through, not 'none'"),
        ({"norm_penalty": "squared"}, "norm_penalty must be one of absolute, hinge, not 'squared'"),
        ({"norm_weight": -0.1}, r"norm_weight must be a number of at least 0, not -0\.1"),
        ({"norm_target": math.inf}, "norm_target must be a number of at least 0, not inf"),
        ({"server_optimizer": "lamb"}, "server_optimizer must be .*, not 'lamb'"),
        ({"local_momentum": 1.0}, r"local_momentum must be .*, not 1\.0"),
    ],
)
def test_values_that_mean_nothing(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_algorithm("dp_pfed_dsu", arguments, num_clients=2, rounds=1, head=HEAD)
