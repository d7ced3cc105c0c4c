"""Real runs, of a dozen made-up writers."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
from msgspec.structs import replace

from tests.beam_pipelines.sources.raw_images import write_idx, write_writers
from tests.privacy.accounting.anchor_support import by_transforms
from tests.reproduce.reproduce_support import build_reproduction
from tests.reproduce.settings_support import setting_changed
from tff_pdp.experiment.build import build_method, computations_key
from tff_pdp.privacy.accounting.budgets import OneForAll
from tff_pdp.privacy.mechanisms.user_noise import AdaptiveClip, TreeNoise
from tff_pdp.privacy.plans.unprotected import without_privacy
from tff_pdp.reproduce.inputs import digest_of
from tff_pdp.reproduce.jobs import Job
from tff_pdp.reproduce.run import JobRunner

WRITERS, IMAGES_EACH = 12, 20
SMALL = {
    "training.rounds": 3,
    "privacy.users_per_round": 4,
    "privacy.clip_norm": 0.5,
    "privacy.batch_size": 16,
    "model": {"kind": "mlp", "hidden_units": [4]},
    "algorithms.local_only": {"learning_rate": 0.5, "local_steps": 3},
    "algorithms.centaur": {
        "learning_rate": 0.5,
        "local_steps": 2,
        "head_learning_rate": 0.5,
        "head_steps": 2,
        "adapt_steps": 4,
    },
}


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory):
    """The writers' setting: each has images of two digits, a bright stripe in a place that tells which."""
    folder = tmp_path_factory.mktemp("users")
    rng = np.random.default_rng(0)
    writers = np.repeat(np.arange(WRITERS), IMAGES_EACH)
    labels = (writers + rng.integers(0, 2, len(writers))) % 10
    images = rng.integers(0, 60, (len(labels), 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[2 + 2 * label : 4 + 2 * label] += 190
    (folder / "mnist").mkdir()
    write_idx(folder / "mnist" / "train-images-idx3-ubyte.gz", images.astype(np.uint8))
    write_idx(folder / "mnist" / "train-labels-idx1-ubyte.gz", labels.astype(np.uint8))
    write_writers(folder / "mnist_writers" / "qmnist-train-labels-idx2-int.gz", labels, writers)
    with setting_changed("mnist_writers", SMALL):
        yield build_reproduction(
            folder,
            setting_name="mnist_writers",
            scale_name="small",
            methods=("local_only", "centaur"),
            epsilons=(2.0, 8.0, math.inf),
            data_input=folder / "mnist",
            data_digest=digest_of(folder / "mnist"),
        )


@pytest.fixture(scope="module")
def rows(reproduction):
    """One seed's rows, all of one process, and how often it compiled."""
    with contextlib.closing(JobRunner(reproduction)) as runner:
        found = {(job.method, job.budget): runner(job).row for job in reproduction.jobs() if job.seed == 0}
        return found, len(runner.computations)


def test_one_compiled_process_serves_all_epsilons_of_a_method(reproduction, rows):
    found, compiled = rows
    assert compiled == 2
    # Of what came before in the same process, nothing is left: alone, a job gives the same.
    with contextlib.closing(JobRunner(reproduction)) as other:
        assert other(Job("default", "centaur", 8.0, 0)).row == found["centaur", 8.0]
    assert len({found["centaur", epsilon]["value"] for epsilon in (2.0, 8.0, math.inf)}) > 1


def test_rows_of_users_say_who_is_served_worst_and_how_long_the_noise_is(rows):
    found, _ = rows
    tight, loose, free = (found["centaur", epsilon] for epsilon in (2.0, 8.0, math.inf))
    assert list(tight)[:5] == ["method", "epsilon", "seed", "metric", "value"]
    assert 0 <= tight["worst_decile"] <= tight["mean_over_clients"] <= 1
    assert tight["noise_multiplier"] > loose["noise_multiplier"] > free["noise_multiplier"] == 0
    assert tight["noise_to_signal"] > loose["noise_to_signal"] > free["noise_to_signal"] == 0
    assert 1.9 < tight["with_secret_key"]["epsilon"] <= 2
    assert (tight["claim"], tight["epsilon_spent"]) == ("none", None)
    assert (free["epsilon"], free["with_secret_key"]["epsilon"]) == ("inf", None)
    assert tight["learning_rate"] == 0.5


def test_what_releases_nothing_is_run_once_and_spends_nothing(rows):
    found, _ = rows
    assert [epsilon for method, epsilon in found if method == "local_only"] == [math.inf]
    row = found["local_only", math.inf]
    assert (row["epsilon"], row["with_secret_key"]["epsilon"], row["noise_to_signal"]) == ("inf", None, 0.0)
    # Two digits each: whoever learns at all is better than one in ten.
    assert row["value"] > 0.3


def test_the_planned_epsilon_of_users_is_what_the_ledger_says_after_every_round(reproduction):
    config = reproduction.config(Job("default", "centaur", 2.0, 0))
    plan = build_method(config, "centaur").plan
    ledger = plan.build_ledger()
    for round_number in (1, 2, 3):
        plan.charge_round(ledger, round_number)
    (scope,) = plan.budgets
    bound = by_transforms(3, plan.budgets[scope].delta)
    assert plan.planned_epsilon() == pytest.approx(ledger.epsilon(scope).best, rel=bound)


def test_computations_are_shared_only_where_nothing_compiled_differs(reproduction):
    config = reproduction.config(Job("default", "centaur", 8.0, 0))
    method = build_method(config, "centaur")

    def key(noise=None, mechanism=None, **sections):
        changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
        plan = dataclasses.replace(
            method.plan,
            noise=noise or method.plan.noise,
            mechanism=dataclasses.replace(method.plan.mechanism, **(mechanism or {})),
        )
        return computations_key(replace(config, **changed), method.algorithm, WRITERS, plan.server_sum())

    without_noise = replace(config, privacy=without_privacy(config.privacy))
    same = (
        key(mechanism={"clip_norm": math.inf, "noise_multiplier": 0.0, "expected_cohort": 3.0}),
        key(privacy={"clip_norm": 0.1, "budgets": OneForAll(epsilon=3.0, delta=1e-4)}),
        computations_key(without_noise, method.algorithm, WRITERS, method.plan.server_sum()),
        key(training={"weight_cap": 5, "test_only_seed": 1}),
    )
    assert set(same) == {key()}
    others = (
        key(privacy={"batch_size": 7}),
        key(mechanism={"sampling_rate": 0.5}),
        key(noise=TreeNoise()),
        key(noise=AdaptiveClip()),
        key(noise=AdaptiveClip(quantile=0.7)),
        key(training={"weighting": "paper_capped_num_examples"}),
        key(training={"rounds": 4}),
    )
    assert len({key(), *others}) == len(others) + 1
