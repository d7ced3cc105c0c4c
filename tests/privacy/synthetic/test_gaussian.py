import itertools
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest

from tests.privacy.synthetic.extremes import EXTREMES, NAN, clustered, squared_change
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws, add_noise
from tff_pdp.privacy.synthetic.base import GENERATORS, draw_labels, draw_normals
from tff_pdp.privacy.synthetic.gaussian import MOST_VALUES, DpGaussian, dp_gaussian, moment_steps, unit_rows
from tff_pdp.settings import read_settings

NEARLY_NONE = 1e-7


def draws_of(key=b"a key of synthetic data"):
    return ExactDraws(key)


def settings_of(**changes):
    return DpGaussian(**{"examples": 100, "num_classes": 2, "low": -1.0, "high": 1.0, "radius": 1.5, **changes})


@pytest.mark.parametrize("noise_multiplier", [0.05, 1.7, 1e4, NEARLY_NONE])
@pytest.mark.parametrize("changes", [{}, {"radius": None}, {"count_share": 0.9, "mean_share": 0.4}, {"radius": 1e-20}])
def test_no_record_whatsoever_moves_the_sum_by_more_than_one(noise_multiplier, changes):
    settings = settings_of(**changes)
    ordinary = np.random.default_rng(0).normal(0, 1, size=(8, 3))
    records = np.concatenate([EXTREMES, ordinary])
    labels = np.arange(len(records)) % 2
    whole = moment_steps(records, labels, settings, noise_multiplier)
    changed = [
        squared_change(
            whole - moment_steps(np.delete(records, row, 0), np.delete(labels, row), settings, noise_multiplier),
            noise_multiplier,
        )
        for row in range(len(records))
    ]
    assert max(changed) <= 1
    # A smaller bound would be wrong: records at the bound move the sum by all of it, but for what rounding may add.
    assert noise_multiplier > 2 or max(changed) > 1 - Fraction(1, 10**4)


def test_images_move_the_sum_by_no_more_than_one():
    settings = settings_of(low=0.0, radius=2.0, pool=2)
    images = np.random.default_rng(1).uniform(-2, 3, size=(4, 4, 6, 2))
    for image in [*images, np.full((4, 6, 2), 1e9), np.full((4, 6, 2), NAN)]:
        alone = moment_steps(image[None], np.array([1]), settings, 1.0)
        nobody = moment_steps(image[None][:0], np.zeros(0, np.int64), settings, 1.0)
        assert not nobody.any()
        assert squared_change(alone - nobody, 1.0) <= 1


def test_shares_of_the_sensitivity_make_one_and_no_more():
    for a, b in [(0.3, 0.6), (0.9, 0.1), (0.5, 0.5), (0.1, 0.7), (1 / 3, 1 / 7)]:
        settings = settings_of(count_share=a, mean_share=b)
        total = sum(Fraction(share) ** 2 for share in (a, b, settings.product_share))
        assert 1 - Fraction(1, 2**50) < total <= 1
    # These are rounded in the literature to .3, .6 and .742, whose squares are more than one.
    assert settings_of().product_share == pytest.approx(math.sqrt(0.55))
    with pytest.raises(ValueError, match=r"the sum of their squares must be at most 0\.999"):
        settings_of(count_share=0.8, mean_share=0.7)


def test_rows_are_clipped_to_range_and_radius():
    settings = settings_of(low=0.0, high=2.0, radius=2.0)
    rows = unit_rows(np.array([[3.0, 0.0, -4.0], [2.0, 2.0, 1.0], [NAN, 0, 0]]), settings)
    # (2, 0, 0) / 2; (2, 2, 1) has norm 3; what is missing is the middle of the range.
    assert rows == pytest.approx(np.array([[1, 0, 0], [2 / 3, 2 / 3, 1 / 3], [0.5, 0, 0]]), abs=1e-11)
    assert np.linalg.norm(rows, axis=1).max() < 1


def test_a_row_is_the_same_to_the_bit_whatever_rows_are_beside_it():
    settings = settings_of(pool=2, radius=1.1)
    images = np.random.default_rng(3).normal(size=(70, 6, 10))
    rows = unit_rows(images, settings)
    for first, last in [(0, 1), (3, 4), (1, 70), (10, 27), (69, 70)]:
        assert unit_rows(images[first:last], settings).tobytes() == rows[first:last].tobytes()
    pooled = np.clip(images, -1, 1).reshape(70, 3, 2, 5, 2).mean(axis=(2, 4)).reshape(70, 15)
    norms = np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1.1)
    assert rows == pytest.approx(pooled / norms, abs=1e-11)


def test_sums_are_those_of_a_straightforward_version():
    x, y = clustered(50)
    settings, z = settings_of(radius=0.4), 0.5
    a, b, c = settings.count_share, settings.mean_share, math.sqrt(0.55)
    expected = np.zeros(2 + 6 + 6)
    for row, label in zip(x, y, strict=True):
        u = row / max(np.linalg.norm(row), 0.4)
        pairs = [u[i] * u[j] * math.sqrt(2) for i, j in itertools.combinations(range(3), 2)]
        block = np.zeros((2, 3))
        block[label] = b * u
        expected += np.concatenate([a * np.eye(2)[label], block.ravel(), c * u**2, c * np.array(pairs)])
    sums = moment_steps(x, y, settings, z).astype(np.float64) * z * 2.0**-GRID_BITS
    # A feature is rounded by less than 2**-20, fifty times.
    assert sums == pytest.approx(expected, abs=50 * 2 * 2.0**-20)


def test_nearly_without_noise_means_covariance_and_proportions_come_back():
    x, y = clustered(4000)
    settings = settings_of(examples=40_000, radius=None)
    made = dp_gaussian(x, y, settings, NEARLY_NONE, draws_of())
    assert made.x.shape == (40_000, 3) and made.x.dtype == np.float64
    assert made.y.dtype == np.int64 and np.bincount(made.y).tolist() == [30_000, 10_000]
    pooled = sum(np.cov(x[y == label].T, bias=True) * (y == label).mean() for label in (0, 1))
    for label in (0, 1):
        own = made.x[made.y == label]
        deviations = np.sqrt(np.diag(pooled) / len(own))
        assert own.mean(0) == pytest.approx(x[y == label].mean(0), abs=5 * deviations.max())
        # Standard error of a covariance: at most sqrt(2 / n) of the variances' product's root.
        error = 5 * np.sqrt(2 * np.outer(np.diag(pooled), np.diag(pooled)) / len(own)).max()
        assert np.cov(own.T, bias=True) == pytest.approx(pooled, abs=error)


def test_noise_on_the_release_is_on_the_grid_and_has_its_deviation():
    x, y = clustered(300)
    settings, z = settings_of(), 0.7
    steps = moment_steps(x, y, settings, z)
    draws = draws_of()
    noised = np.stack([add_noise(steps, z, draws) for _ in range(60)])
    # Halves of steps: nothing else is ever released.
    half = z * 2.0 ** -(GRID_BITS + 1)
    halves = np.rint(noised / half)
    assert (halves * half == noised).all() and (halves % 2 == 1).all()
    rest = noised - steps.astype(np.float64) * z * 2.0**-GRID_BITS
    assert rest.std() == pytest.approx(z, rel=5 * math.sqrt(0.5 / rest.size))


def test_features_vary_by_themselves_where_the_noise_hides_directions():
    n, features = 4000, 32
    # The unit of the noise on second moments, for z = 1 and R = 1; five units are below the edge of the noise's own
    # eigenvalues, 2 sqrt(32 / 2) = 8 units, and above two units.
    variance = 5 / (DpGaussian(examples=1).product_share * n)
    x = np.random.default_rng(0).choice([-1, 1], (n, features)) * math.sqrt(variance)
    found = {}
    for own in (False, True):
        settings = settings_of(examples=4000, num_classes=1, radius=1.0, own_variances=own)
        found[own] = dp_gaussian(x, np.zeros(n, int), settings, 1.0, draws_of()).x.var(axis=0) / variance
    # A released variance has a standard deviation of one unit, a fifth of the variance.
    assert found[True].mean() == pytest.approx(1, abs=0.15) and found[False].mean() < 0.7
    # Constant features have no variance of their own, but by chance: the probability of two deviations is 2.3 %.
    settings = settings_of(examples=100, num_classes=1, radius=1.0, own_variances=True)
    still = dp_gaussian(np.zeros((n, features)), np.zeros(n, int), settings, 1.0, draws_of()).x
    assert (still.std(axis=0) < 1e-6).mean() > 0.8


def test_the_plan_has_the_numbers_of_the_release():
    settings = settings_of(num_classes=3, count_share=0.5, pool=2)
    # Four pooled features: 3 (1 + 4) + 4 * 5 / 2 values; a count has the share 0.5, and needs four deviations.
    assert settings.plan((4, 4), 1.5) == {
        "released_values": 25,
        "noise_deviation_of_a_class_count": 3,
        "class_appears_from_noised_count": 12,
    }
    with pytest.raises(ConfigError, match="pooling needs images"):
        settings.plan((5, 4), 1.5)
    assert settings.table_settings(2.5) == {"radius": 2.5, "own_variances": True}


def test_labels_are_in_proportion_whatever_the_draws():
    counts = np.array([10.0, 0.0, 25.5, 64.5])
    for key in range(20):
        labels = draw_labels(counts, 1000, draws_of(b"sixteen bytes %3d" % key))
        found = np.bincount(labels, minlength=4)
        assert np.abs(found - 10 * counts).max() <= 1 and found[1] == 0
    # In random order: the first half is no class alone.
    assert len(set(labels[:100].tolist())) == 3


def test_normals_are_normal():
    drawn = draw_normals((1001, 3), draws_of())
    assert drawn.shape == (1001, 3)
    error = 5 / math.sqrt(drawn.size)
    assert abs(drawn.mean()) < error and abs(drawn.std() - 1) < error
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / drawn.size)
    assert np.cov(drawn.T) == pytest.approx(np.eye(3), abs=5 * math.sqrt(2 / 1001))


def test_classes_without_records_are_left_out():
    x, y = clustered(1200)
    settings = settings_of(num_classes=10)
    for number in range(20):
        made = dp_gaussian(x, np.where(y, 7, 3), settings, 0.6, draws_of(b"sixteen bytes %3d" % number))
        assert set(made.y.tolist()) == {3, 7}


def test_too_few_records_are_refused_after_the_release():
    x, y = clustered(3)
    message = r"a noised count above 13\.33, .* The release has been made: its cost counts"
    for number in (0, 1, 3):
        with pytest.raises(DataError, match=message):
            dp_gaussian(x[:number], y[:number], settings_of(), 1.0, draws_of())


def test_one_class_is_enough():
    x, _ = clustered(500)
    made = dp_gaussian(x, np.zeros(500, np.int64), settings_of(num_classes=1, examples=7), 1.0, draws_of())
    assert made.x.shape == (7, 3) and not made.y.any()


def test_examples_stay_in_range_whatever_the_records():
    x = np.tile(EXTREMES, (40, 1))
    made = dp_gaussian(x, np.zeros(len(x), np.int64), settings_of(num_classes=1, examples=500), 2.0, draws_of())
    assert np.isfinite(made.x).all() and made.x.min() >= -1 and made.x.max() <= 1


def test_equal_keys_give_equal_bits_and_others_do_not():
    x, y = clustered(300)
    first, again = (dp_gaussian(x, y, settings_of(), 1.0, draws_of()) for _ in range(2))
    other = dp_gaussian(x, y, settings_of(), 1.0, draws_of(b"quite another key"))
    assert (first.x == again.x).all() and (first.y == again.y).all()
    assert not (first.x == other.x).any()


def test_the_size_is_public():
    for n in (200, 900):
        x, y = clustered(n)
        assert len(dp_gaussian(x, y, settings_of(examples=33), 0.5, draws_of()).x) == 33


def test_pooled_images_have_the_shape_of_the_records():
    generator = np.random.default_rng(2)
    images = np.clip(generator.normal(0.5, 0.1, size=(2000, 4, 6, 1)), 0, 1)
    images[:, :2, :2] = 0.9
    settings = DpGaussian(examples=400, pool=2)
    made = dp_gaussian(images, np.zeros(2000, np.int64), settings, 0.1, draws_of())
    assert made.x.shape == (400, 4, 6, 1)
    squares = made.x.reshape(400, 2, 2, 3, 2, 1)
    assert (squares == squares[:, :, :1, :, :1]).all()
    assert made.x.mean(0)[:2, :2] == pytest.approx(0.9, abs=0.02)
    # The mean of four has half their deviation.
    assert made.x[:, 3, 5].std() == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((2, 3), {"pool": 2}, "pool is 2, but examples have the shape"),
        ((2, 5, 4), {"pool": 2}, "multiples of it"),
        ((2, 0), {}, "no features"),
        ((2, 1500), {}, rf"at most {MOST_VALUES:,} are possible"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_the_release(shape, changes, message):
    draws = draws_of()
    with pytest.raises(ConfigError, match=message):
        dp_gaussian(np.zeros(shape), np.zeros(2, np.int64), settings_of(**changes), 1.0, draws)
    assert draws.words(3).tolist() == draws_of().words(3).tolist()


def test_labels_out_of_range_and_other_noise_are_refused():
    x = np.zeros((2, 3))
    for labels in ([0, 2], [-1, 0]):
        with pytest.raises(DataError, match="a label is not one of the classes 0 to 1"):
            dp_gaussian(x, np.array(labels), settings_of(), 1.0, draws_of())
    with pytest.raises(ConfigError, match="2 examples, but labels of shape"):
        dp_gaussian(x, np.zeros(3, np.int64), settings_of(), 1.0, draws_of())
    for noise in (0.0, -1.0, NAN, 1e5):
        with pytest.raises(ConfigError, match="noise_multiplier"):
            dp_gaussian(x, np.zeros(2, np.int64), settings_of(), noise, draws_of())


def test_the_event_is_one_gaussian():
    assert settings_of().event(1.25) == dp_accounting.GaussianDpEvent(1.25)


def test_settings_are_found_by_kind():
    kind = GENERATORS.find("dp_gaussian")
    found = read_settings(kind, {"kind": "dp_gaussian", "examples": 5}, "a.yaml", "synthetic")
    assert found == DpGaussian(examples=5)
    for content, message in [
        ({"examples": 0}, "synthetic.examples must be a whole number of at least 1"),
        ({"examples": 5, "radius": 0}, "synthetic.radius must be a number"),
        ({"examples": 5, "low": 1}, "low is 1 and high is 1; low must be below high"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_settings(kind, {"kind": "dp_gaussian", **content}, "a.yaml", "synthetic")
    with pytest.raises(ConfigError, match="did you mean dp_gaussian"):
        GENERATORS.find("dp_gausian")
