"""Every generator by way of an experiment: which classes appear, extreme records, claims, and refusals."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.data.written_clients import write_clients
from tests.places import DEMO
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.before_training import RELEASES_FILE, STATISTICS
from tff_pdp.experiment.build import build_method, keep_computations
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.synthetic_data import DATA_FILE, KEY_FILE
from tff_pdp.registry.entries import Registry

FEATURES, CLASSES = 8, 10
GAUSSIAN = {"kind": "dp_gaussian", "examples": 100, "low": -1.0, "high": 1.0}
LENS = {
    "kind": "datalens",
    "examples": 40,
    "low": -1.0,
    "high": 1.0,
    "teachers": 50,
    "votes": 2,
    "steps": 2,
    "fakes_per_step": 2,
    "latents": 4,
    "student_units": [8],
    "teacher_units": 4,
}
CGAN = {
    "kind": "dp_cgan",
    "examples": 40,
    "low": -1.0,
    "high": 1.0,
    "steps": 3,
    "discriminator_steps": 1,
    "sampling_rate": 0.5,
    "batch_size": 100.0,
    "latents": 4,
    "generator_units": [8],
    "discriminator_units": [8],
}


@pytest.fixture(scope="module", autouse=True)
def one_computation():
    """Methods of this module have the same computations, which take most of the time to build."""
    with keep_computations({}):
        yield


def records(n, classes=CLASSES, seed=0):
    """Points around a mean for each class, float32 `[n, 8]`, with labels in turn."""
    generator = np.random.default_rng(seed)
    y = np.resize(np.arange(classes), n)
    x = 0.5 * np.cos(np.outer(y + 1, np.arange(1, FEATURES + 1))) + 0.1 * generator.normal(size=(n, FEATURES))
    return x.astype(np.float32), y.astype(np.int64)


def config_of(folder, silos, generator=GAUSSIAN, epsilon=10.0, **overrides):
    """An experiment on silos' records as they are, without the job that would leave unusable ones out."""
    settings = {
        "output": str(folder),
        "data.input_shape": [FEATURES],
        "data.num_classes": CLASSES,
        "privacy": {
            "kind": "silo_example",
            # All records, so that noise follows from a formula; for samples it takes seconds to work out.
            "batch_size": 5000,
            "clip_norm": 1.0,
            "budgets": {"kind": "one_for_all", "epsilon": epsilon, "delta": 1e-5},
            "synthetic": {"generator": generator, "rounds": 1},
            "registry": str(folder / "registry"),
        },
        "training.rounds": 2,
        # Draws are the same in each run of the tests.
        "training.test_only_seed": 1,
        "algorithms": {"fed_avg": {"adaptation_steps": 1}},
        "export.algorithm": "fed_avg",
        "tuning": {},
        **overrides,
    }
    config = load_experiment(DEMO, settings)
    if not config.clients_folder.exists():
        features = FeatureSpec.of((FEATURES,), CLASSES)
        assert features.x_dtype == "float32"
        write_clients(config.clients_folder, features, [(name, "train", 0, *own) for name, own in silos.items()])
    return config


def released_by(config):
    """Each silo's synthetic examples, by name."""
    source = build_method(config, "fed_avg").first_phase.source
    return {name: source.load(name) for name in source.client_ids}


def entries_of(config):
    return Registry(config.privacy.registry).entries()


def test_twenty_silos_with_six_of_ten_classes_make_no_example_of_another(tmp_path):
    silos = {f"silo_{number:02}": records(2000, classes=6, seed=number) for number in range(20)}
    made = released_by(config_of(tmp_path, silos))
    assert len(made) == 20
    assert {tuple(np.unique(own.y)) for own in made.values()} == {(0, 1, 2, 3, 4, 5)}


def test_the_number_of_records_does_not_show_in_the_synthetic_set(tmp_path):
    sizes = (500, 501, 5000)
    config = config_of(tmp_path, {f"silo_{size}": records(size) for size in sizes})
    method = build_method(config, "fed_avg")
    for size in sizes:
        assert method.clients.num_examples(f"silo_{size}", "train") == size
        own = method.first_phase.source.load(f"silo_{size}")
        assert (own.x.shape, own.y.shape) == ((100, FEATURES), (100,))
    first = method.first_phase
    steps = first.algorithm.num_gradients(first.hparams)
    assert len(set(steps.tolist())) == 1, "nor does the number of steps on the set"


def test_one_record_is_too_few_and_its_release_is_accounted_for_once(tmp_path):
    config = config_of(tmp_path, {"full": records(500), "lonely": records(1)})
    messages = []
    for _ in range(2):
        with pytest.raises(DataError, match=r"privacy\.synthetic: silo 'lonely'") as refused:
            build_method(config, "fed_avg")
        messages.append(str(refused.value))
        (entry,) = entries_of(config)
        assert entry.method == STATISTICS
        assert {one.scope for one in entry.planned.ledger.entries} == {"full", "lonely"}
        assert (tmp_path / KEY_FILE).exists(), "another attempt has the same noise"
        assert not (tmp_path / DATA_FILE).exists() and not (tmp_path / RELEASES_FILE).exists()
    assert messages[0] == messages[1]


def test_one_class_and_extreme_records_give_examples_in_range(tmp_path):
    """Rows that are not numbers, or far beyond the radius, count as records of norm R: no more than any other."""
    x, y = records(500)
    extreme = x.copy()
    extreme[0] = math.nan
    extreme[1, ::2] = math.nan
    extreme[2], extreme[3] = 3e38, -3e38
    extreme[4], extreme[5] = math.inf, -math.inf
    one_class = (x, np.full(len(y), 7, np.int64))
    made = released_by(config_of(tmp_path, {"extreme": (extreme, y), "one_class": one_class, "plain": (x, y)}))
    assert set(made["one_class"].y.tolist()) == {7}
    for own in made.values():
        assert np.isfinite(own.x).all() and own.x.min() >= -1 and own.x.max() <= 1
    assert set(made["extreme"].y.tolist()) == set(made["plain"].y.tolist()) == set(range(CLASSES))
    # Six of 500 records, whose rows have norms of at most sqrt(8), move a mean by at most 6 sqrt(8) / 500.
    means = [made[name].x.astype(np.float64).mean(axis=0) for name in ("extreme", "plain")]
    spread = 2 * made["plain"].x.std(axis=0).max() / math.sqrt(100)
    noise = build_noise(config_of(tmp_path, {}), "plain")
    assert np.abs(means[0] - means[1]).max() <= 6 * math.sqrt(FEATURES) / 500 + 4 * (spread + noise)


def build_noise(config, silo):
    """Deviation of the noise on a mean of 500 records, whose sums have the share 0.6 of a sensitivity of sqrt(8)."""
    method = build_method(config, "fed_avg")
    (event,) = [event for event, _ in method.plan.fixed_events[silo]]
    # Class by class, ten sums make one mean.
    return math.sqrt(CLASSES) * event.noise_multiplier * math.sqrt(FEATURES) / 0.6 / 500


@pytest.mark.parametrize(
    ("generator", "reason"),
    [(CGAN, "synthetic data: "), (LENS, "synthetic data: ")],
    ids=["dp_cgan", "datalens"],
)
def test_generators_by_networks_run_and_their_condition_stands_in_the_claim(tmp_path, generator, reason):
    config = config_of(tmp_path, {"one": records(200), "two": records(200, seed=1)}, generator)
    method = build_method(config, "fed_avg")
    assert method.plan.claim == "formal-conditional"
    condition = config.privacy.synthetic.generator.claim[1]
    assert condition and f"{reason}{condition}" in method.plan.claim_reason
    for name in method.clients.client_ids:
        own = method.first_phase.source.load(name)
        assert own.x.shape == (40, FEATURES)
        assert np.isfinite(own.x).all() and own.x.min() >= -1 and own.x.max() <= 1
        assert method.plan.build_ledger().epsilon(name).best <= 5.0, "half of the budget, at half of delta"


def test_votes_below_their_noise_are_refused_before_anything_is_released(tmp_path):
    config = config_of(tmp_path, {"one": records(200)}, {**LENS, "teachers": 2})
    with pytest.raises(
        ConfigError, match=r"privacy\.synthetic\.generator: .*but 2 teachers together.*Nothing was released"
    ):
        build_method(config, "fed_avg")
    for name in (DATA_FILE, RELEASES_FILE, KEY_FILE):
        assert not (tmp_path / name).exists()
    assert entries_of(config) == []


def test_the_papers_even_partition_claims_nothing_anywhere(tmp_path):
    generator = {**LENS, "paper_even_partition": True}
    config = config_of(tmp_path, {"one": records(200)}, generator, **{"training.test_only_seed": None})
    method = build_method(config, "fed_avg")
    why = config.privacy.synthetic.generator.why_not_private
    assert "wrap-around" in why
    assert (method.plan.claim, method.plan.claim_reason) == ("none", why)
    (entry,) = entries_of(config)
    assert (entry.method, entry.non_private, Path(entry.folder)) == (STATISTICS, why, tmp_path)
