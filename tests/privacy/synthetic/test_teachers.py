import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.conditional import one_hot
from tff_pdp.privacy.synthetic.teachers import Teachers, content_names, parts_by_hash

KEY, TEACHERS, VOTES, CLASSES = b"a key of parts of records", 12, 5, 3
GENERATOR = np.random.default_rng(0)
X = GENERATOR.uniform(size=(200, 9)).astype(np.float32)
Y = GENERATOR.integers(CLASSES, size=200)
IDS = [f"person {number}".encode() for number in range(200)]
MADE = GENERATOR.uniform(size=(4, 9)).astype(np.float32)
MADE_LABELS = np.array([0, 1, 2, 1])


def draws_of(key=b"a key of all the teachers"):
    return ExactDraws(key)


def teachers_of(x, y, names, capacity=32, num_teachers=TEACHERS, steps=3):
    teachers = Teachers(
        x,
        y,
        parts_by_hash(names, KEY, num_teachers),
        num_classes=CLASSES,
        capacity=capacity,
        hidden_units=6,
        learning_rate=0.01,
        draws=draws_of(),
    )
    for _ in range(steps):
        teachers.train(MADE, MADE_LABELS)
    return teachers


def votes_of(teachers, max_grad: float | None = 1e-2, draws=None):
    return np.stack(list(teachers.votes(MADE, MADE_LABELS, VOTES, max_grad, draws or draws_of()))).astype(int)


def contents(x, y, names):
    """The content of each teacher's part, in its order."""
    return [[(x[place].tobytes(), y[place]) for place in part] for part in parts_by_hash(names, KEY, TEACHERS)]


def num_changed(one, other):
    return sum(before != after for before, after in zip(one, other, strict=True))


def test_one_record_more_or_less_changes_one_part():
    for name in ("content", "ids"):
        names = content_names(X, Y) if name == "content" else IDS
        whole = contents(X, Y, names)
        # Parts are disjoint, and hold every record.
        assert collections.Counter(one for part in whole for one in part) == collections.Counter(
            (row.tobytes(), label) for row, label in zip(X, Y, strict=True)
        )
        for place in range(200):
            x, y = np.delete(X, place, 0), np.delete(Y, place)
            left = content_names(x, y) if name == "content" else [one for one in IDS if one != IDS[place]]
            assert num_changed(whole, contents(x, y, left)) == 1


def test_another_content_under_the_same_id_changes_one_part_and_under_a_digest_at_most_two():
    whole, by_content = contents(X, Y, IDS), contents(X, Y, content_names(X, Y))
    by_digest = []
    for place in range(200):
        x, y = X.copy(), Y.copy()
        x[place], y[place] = 1 - x[place], (y[place] + 1) % CLASSES
        assert num_changed(whole, contents(x, y, IDS)) == 1
        by_digest.append(num_changed(by_content, contents(x, y, content_names(x, y))))
    assert max(by_digest) == 2 and min(by_digest) >= 1


def test_the_order_of_records_changes_nothing():
    order = np.random.default_rng(1).permutation(200)
    assert contents(X, Y, IDS) == contents(X[order], Y[order], [IDS[place] for place in order])


@pytest.mark.parametrize("max_grad", [None, 1e-2])
@pytest.mark.parametrize("capacity", [4, 32])
def test_no_record_moves_the_votes_by_more_than_twice_the_root_of_k(max_grad, capacity):
    trained = teachers_of(X, Y, IDS, capacity)
    gradients, votes = trained.gradients(MADE, MADE_LABELS), votes_of(trained, max_grad)
    assert votes.shape == (4, TEACHERS, 9) and set(np.unique(votes)) <= {-1, 0, 1}
    assert (np.abs(votes).sum(axis=2) <= VOTES).all()
    furthest = 0.0
    for place in range(200):
        removed = np.delete(X, place, 0), np.delete(Y, place), [one for one in IDS if one != IDS[place]]
        x = X.copy()
        x[place] = 1 - x[place]
        for changed in (removed, (x, Y, IDS)):
            other = teachers_of(*changed, capacity)
            # All other teachers are the same to the bit.
            is_same = (other.gradients(MADE, MADE_LABELS) == gradients).all(axis=(1, 2))
            assert is_same.sum() >= TEACHERS - 1
            found = votes_of(other, max_grad)
            assert (found != votes).any(axis=(0, 2)).sum() <= 1
            furthest = max(furthest, np.linalg.norm(found.sum(axis=1) - votes.sum(axis=1), axis=1).max())
    assert 0 < furthest <= 2 * math.sqrt(VOTES)


def test_the_bound_on_votes_is_reached():
    # The first record turns the only teacher that it goes to around.
    ones = {"x": np.zeros((1, 9), np.float32), "y": np.array([0])}
    x = np.ones((1, 9), np.float32)
    trained = [teachers_of(one, ones["y"], [b"one"], num_teachers=1, steps=150) for one in (ones["x"], x)]
    first, second = (votes_of(one, None).sum(axis=1)[0] for one in trained)
    assert np.linalg.norm(first) == pytest.approx(math.sqrt(VOTES))
    assert np.linalg.norm(first - second) > math.sqrt(VOTES)


def test_teachers_without_records_abstain():
    for max_grad in (None, 1e-2):
        votes = votes_of(teachers_of(X[:1], Y[:1], IDS[:1]), max_grad)
        assert (np.abs(votes).sum(axis=(0, 2)) > 0).sum() == 1
        assert not votes_of(teachers_of(X[:0], Y[:0], []), max_grad).any()


def test_votes_are_those_of_a_straightforward_version():
    trained = teachers_of(X, Y, IDS)
    gradients, votes = trained.gradients(MADE, MADE_LABELS), votes_of(trained, None)
    for example in range(4):
        for teacher in range(TEACHERS):
            own = gradients[teacher, example]
            expected = np.zeros(9)
            for feature in sorted(range(9), key=lambda place: -abs(own[place]))[:VOTES]:
                expected[feature] = np.sign(own[feature])
            assert votes[example, teacher].tolist() == expected.tolist()


def test_stochastic_votes_are_as_frequent_as_gradients_say():
    trained = teachers_of(X, Y, IDS)
    gradients, draws, repeated = trained.gradients(MADE, MADE_LABELS), draws_of(b"another key of votes"), 1000
    mean = np.mean([votes_of(trained, 1.0, draws) for _ in range(repeated)], axis=0)
    largest = np.abs(gradients).max(axis=2)
    assert largest.max() < 1.0
    chosen = np.abs(gradients) >= np.sort(np.abs(gradients), axis=2)[:, :, -VOTES, None]
    expected = np.where(chosen, gradients / largest[:, :, None], 0)
    assert mean.transpose(1, 0, 2) == pytest.approx(expected, abs=5.5 / math.sqrt(repeated))
    # Gradients far above the bound have plain signs.
    plain = votes_of(trained, None)
    assert (votes_of(trained, 1e-12) == plain).all()


def test_training_is_that_of_tensorflow():
    """One teacher: losses, gradients and Adam by another implementation."""
    teachers = teachers_of(X, Y, IDS, num_teachers=3, capacity=100, steps=0)
    start = [weight.copy() for weight in teachers._weights]
    for _ in range(4):
        teachers.train(MADE, MADE_LABELS)
    found, parts = teachers.gradients(MADE, MADE_LABELS), parts_by_hash(IDS, KEY, 3)
    for teacher in range(3):
        weights = [tf.Variable(weight[teacher]) for weight in start]
        places = parts[teacher]
        real = np.concatenate([X[places], one_hot(Y[places], CLASSES)], axis=1)
        made = np.concatenate([MADE, one_hot(MADE_LABELS, CLASSES)], axis=1)

        def scores(inputs, weights=weights):
            return tf.nn.leaky_relu(inputs @ weights[0] + weights[1], 0.2) @ weights[2] + weights[3]

        optimizer = tf.keras.optimizers.Adam(0.01, beta_1=0.5, epsilon=1e-8)
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(-scores(real))) + tf.reduce_mean(tf.nn.softplus(scores(made)))
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        inputs = tf.constant(made)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(tf.nn.softplus(-scores(inputs)))
        assert found[teacher] == pytest.approx(-np.asarray(tape.gradient(loss, inputs))[:, :9], rel=2e-3, abs=2e-6)
