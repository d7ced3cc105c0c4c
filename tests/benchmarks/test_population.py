"""The raw data of the benchmark of a large population: sizes as stated, files that the job reads, a fixed seed."""

import numpy as np
import yaml

from beam_pipelines.rules import ExampleRule
from beam_pipelines.sources.leaf import read_users
from benchmarks.population.run import settings
from benchmarks.population.users import CLASSES, SHAPE, num_examples, user_name, write_users
from tff_pdp.experiment.config import load_experiment


def test_users_have_between_1_and_300_examples_half_of_them_at_most_17():
    sizes = num_examples(20_000)
    assert (sizes.min(), sizes.max(), len(sizes)) == (1, 300, 20_000)
    # floor(exp(u)) <= 17 where u < log(18), and log(18) / log(301) is 0.506; six standard deviations.
    assert abs((sizes <= 17).mean() - np.log(18) / np.log(301)) < 6 * np.sqrt(0.25 / 20_000)
    np.testing.assert_array_equal(sizes, num_examples(20_000))


def test_files_have_all_users_and_valid_examples(tmp_path):
    sizes = np.array([3, 1, 5, 2, 4])
    nbytes = write_users(tmp_path / "raw", sizes, users_per_file=2)
    paths = sorted((tmp_path / "raw").iterdir())
    assert len(paths) == 3 and sum(path.stat().st_size for path in paths) == nbytes
    users = [user for path in paths for user in read_users(path)]
    assert [user.client for user in users] == [user_name(number) for number in range(5)]
    assert [user.num_samples for user in users] == sizes.tolist()
    rule = ExampleRule(int(np.prod(SHAPE)), CLASSES, are_images=True)
    assert all(len(user.x) == user.num_samples and rule.problems(user.x, user.y) == {} for user in users)
    # Other files hold the same users.
    write_users(tmp_path / "other", sizes, users_per_file=5)
    (path,) = (tmp_path / "other").iterdir()
    for user, other in zip(users, read_users(path), strict=True):
        np.testing.assert_array_equal(user.x, other.x)
        assert user.y == other.y


def test_the_settings_are_those_of_an_experiment(tmp_path):
    config = tmp_path / "population.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path / "run", tmp_path / "raw", 100_000)))
    experiment = load_experiment(config)
    assert (experiment.privacy.users_per_round, experiment.training.rounds) == (1_000, 20)
