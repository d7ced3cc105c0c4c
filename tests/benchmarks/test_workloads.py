"""The work is the same for everyone: sizes that can be checked by hand, and nothing left to chance."""

import dataclasses

import numpy as np
import pytest

from benchmarks.rounds.workloads import WORKLOADS, build_workload
from tests.rounding import gamma


def test_a_round_of_w1_and_w2_is_a_hundred_steps_of_ten_examples():
    for name in ("W1", "W1-dp", "W2", "W2-dp"):
        workload = build_workload(name)
        assert workload.clients_per_round * workload.local_steps == 100
        x, y = workload.client_data(3)
        assert len(x) == len(y) == 50
        assert (x.dtype, y.dtype) == (np.float32, np.int32)


def test_model_sizes():
    sizes = {name: sum(w.size for w in build_workload(name).initial_weights().values()) for name in ("W1", "W2")}
    cnn = (9 * 32 + 32) + (9 * 32 * 64 + 64) + (9216 * 128 + 128) + (128 * 62 + 62)
    assert sizes == {"W1": cnn, "W2": (784 * 200 + 200) + (200 * 62 + 62)}


def test_cohorts_are_the_same_in_every_process_and_without_repetition():
    workload = build_workload("W2", clients_per_round=100, population=10000)
    assert workload.cohort(7) == dataclasses.replace(workload).cohort(7)
    assert workload.cohort(7) != workload.cohort(8)
    assert len(set(workload.cohort(7))) == 100
    assert max(workload.cohort(7)) < 10000


def test_the_check_leaves_nothing_to_chance_and_keeps_the_clip():
    check = build_workload("W2-dp").for_check()
    x, y = check.client_data(0)
    assert (x == x[0]).all() and (y == y[0]).all()
    assert (check.noise_multiplier, check.clip_norm) == (0.0, 0.1)
    silos = build_workload("W3").for_check()
    assert silos.noise_multiplier == 0.0
    assert (silos.sampling_rates(np.array([17, 200])) == 1).all()


def test_noise_of_one_update():
    assert build_workload("W2-dp").update_noise_std == pytest.approx(0.1 * 1.0 / 20)
    assert build_workload("W2").update_noise_std is None


def test_w3_has_the_shape_of_school(monkeypatch):
    monkeypatch.delenv("TFF_PDP_DATA", raising=False)
    workload = build_workload("W3")
    assert workload.data_source == "synthetic"
    silos = workload.silos()
    assert silos.x.shape == (139, 200, 28)
    assert (silos.num_examples.min(), silos.num_examples.max()) == (17, 200)
    # Sizes between quantiles of the real schools', which have 12238 examples and 326 steps.
    assert silos.num_examples.sum() == 12290
    assert workload.local_steps(silos.num_examples).sum() == 328
    smallest = silos.num_examples.argmin()
    assert (silos.x[smallest, 17:] == 0).all() and (silos.y[smallest, 17:] == 0).all()
    x = silos.x[smallest, :17].astype(np.float64)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=gamma(2) * np.abs(x).max())


def test_steps_and_rates_by_hand():
    workload = build_workload("W3")
    sizes = np.array([17, 32, 63, 64, 200])
    assert workload.local_steps(sizes).tolist() == [1, 1, 1, 2, 6]
    np.testing.assert_allclose(workload.sampling_rates(sizes) * sizes, [17, 32, 32, 32, 32], rtol=gamma(3))


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="20 clients per round, but a population of only 10"):
        build_workload("W2", population=10)
    with pytest.raises(ValueError, match="all 139 silos"):
        build_workload("W3", clients_per_round=20, population=139)
    assert build_workload("W2", clients_per_round=500).population == 500
    assert build_workload("W3", clients_per_round=20).population == 20
    assert set(WORKLOADS) == {"W1", "W1-dp", "W2", "W2-dp", "W3"}


def test_the_real_school_file_where_it_is_at_hand():
    workload = build_workload("W3")
    if workload.data_source != "School":
        pytest.skip("TFF_PDP_DATA names no folder with school/school.mat")
    silos = workload.silos()
    assert silos.num_examples.sum() == 12238
    assert workload.local_steps(silos.num_examples).sum() == 326
