"""LEAF's split form: folders train and test, divided by sample or by user, and what is wrong in one of them."""

import numpy as np
import pytest

from beam_pipelines.dataset import clients
from beam_pipelines.dataset.job import run_dataset_job
from beam_pipelines.sources import leaf
from beam_pipelines.sources.leaf import list_sources, pair_files
from tests.beam_pipelines.conftest import contents, dead_letters, make_leaf, make_user, run_leaf
from tests.rounding import gamma
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import Tally
from tff_pdp.errors import DataError

NAME = "all_data_{}_niid_0_keep_0_{}_9.json"


@pytest.fixture
def write_split(write_leaf):
    """Writes users' examples as files number 0, 1, ... of train and of test."""

    def write(side, *files):
        for number, users in enumerate(files):
            write_leaf(make_leaf(users), f"{side}/{NAME.format(number, side)}")

    return write


def part(user, start, stop):
    return {"x": user["x"][start:stop], "y": user["y"][start:stop]}


def test_each_side_says_what_its_examples_are_for(write_split, options):
    users = {name: make_user(seed, 20) for seed, name in enumerate("abc")}
    write_split("train", {name: part(users[name], 0, 14) for name in "ab"}, {"c": part(users["c"], 0, 14)})
    write_split("test", {name: part(users[name], 14, 20) for name in "ab"}, {"c": part(users["c"], 14, 20)})
    manifest = run_leaf(options(validation_fraction=0.5)).manifest
    assert manifest.read == manifest.kept == Tally(3, 60)
    assert manifest.num_examples["test"] == 18 and manifest.num_examples["validation"] > 0
    assert manifest.parameters["test_fraction"] is None and manifest.parameters["validation_fraction"] == 0.5
    names = [f"{side}/{NAME.format(number, side)}" for side in ("train", "test") for number in (0, 1)]
    assert [source.name for source in manifest.sources] == names
    dataset = ClientDataset.open(options().output, verify=True)
    for name, user in users.items():
        found = sorted(
            zip(dataset.load(name, "test").x.reshape(6, 4).tolist(), dataset.load(name, "test").y, strict=True)
        )
        expected = sorted(zip(user["x"][14:], user["y"][14:], strict=True))
        for (x, y), (expected_x, expected_y) in zip(found, expected, strict=True):
            assert x == pytest.approx(expected_x, rel=gamma(1)) and y == expected_y


def test_divided_by_user(write_split, options):
    users = {name: make_user(seed, 20) for seed, name in enumerate("abcde")}
    # As LEAF's `-t user` writes them: the numbers of files do not pair users, and test has fewer files.
    write_split("train", {name: users[name] for name in "ab"}, {"c": users["c"]})
    write_split("test", {name: users[name] for name in "de"})
    summary = run_leaf(options(validation_fraction=0.0))
    train, test = {"train": 20, "validation": 0, "test": 0}, {"train": 0, "validation": 0, "test": 20}
    assert summary.manifest.clients == {"a": train, "b": train, "c": train, "d": test, "e": test}
    assert summary.manifest.read == summary.manifest.kept == Tally(5, 100)
    assert summary.as_dict()["clients_without_train_examples"] == 2


def test_one_bad_side_makes_the_user_unusable(write_split, options):
    bad = make_leaf({"bad": make_user(0, 12), "good": make_user(1, 12)})["user_data"]
    train = {name: part(data, 0, 8) for name, data in bad.items()}
    test = {name: part(data, 8, 12) for name, data in bad.items()}
    # One example too many here and one label too many there: the sums agree.
    train["bad"]["x"].append([0.0] * 4)
    test["bad"]["y"].append(0)
    write_split("train", train)
    write_split("test", test)
    manifest = run_leaf(options()).manifest
    assert manifest.dropped == {"x_and_y_differ_in_length": Tally(1, 14)} and manifest.kept == Tally(1, 12)
    assert manifest.read == Tally(2, 26)
    (letter,) = dead_letters(options().output / "dead_letters")
    assert letter["raw"].startswith('"train: {') and letter["num_examples"] == 14
    assert letter["source"] == f"train/{NAME.format(0, 'train')}, test/{NAME.format(0, 'test')}"


def test_bad_example_is_named_by_its_place_in_both_sides(write_split, options):
    user = make_user(0, 12)
    user["y"][9] = 99
    write_split("train", {"a": part(user, 0, 8)})
    write_split("test", {"a": part(user, 8, 12)})
    manifest = run_leaf(options()).manifest
    assert manifest.kept == Tally(1, 11) and manifest.num_examples["test"] == 3
    (letter,) = dead_letters(options().output / "dead_letters")
    assert (letter["example"], letter["reason"]) == (9, "label_out_of_range")


@pytest.mark.parametrize("conflict", [False, True])
def test_copies_of_a_user(write_leaf, options, conflict):
    user = make_user(0, 12)
    for number in range(2):
        other = make_user(1, 12) if conflict and number else user
        for side, (start, stop) in {"train": (0, 8), "test": (8, 12)}.items():
            write_leaf(make_leaf({"a": part(other, start, stop), f"b{number}": user}), f"{side}/{number}_{side}.json")
    dropped = run_leaf(options()).manifest.dropped
    assert dropped["copies_of_user_differ" if conflict else "identical_copy_of_user"].users == (2 if conflict else 1)


def test_same_bytes_with_either_exchange(write_split, options, tmp_path):
    users = {name: make_user(seed, 20) for seed, name in enumerate("abcd")}
    users["a"]["y"][3] = 99
    for side, (start, stop) in {"train": (0, 14), "test": (14, 20)}.items():
        write_split(side, *({name: part(users[name], start, stop)} for name in "abc"))
    first = run_leaf(options())
    second = run_leaf(options(output=tmp_path / "again", exchange="runner"))
    assert contents(first.output) == contents(second.output)


def test_which_files_belong_together():
    train, test = ([NAME.format(number, side) for number in (0, 10)] for side in ("train", "test"))
    units, partners = pair_files([*train, "x_train.json.gz"], [*reversed(test), "x_test.json", "y_test.json"])
    assert units == (*(f"train/{name}" for name in train), "train/x_train.json.gz", "test/y_test.json")
    assert partners == {
        **{f"train/{one}": f"test/{other}" for one, other in zip(train, test, strict=True)},
        "train/x_train.json.gz": "test/x_test.json",
    }
    assert pair_files(["mine.json"], ["yours.json"]) == (("train/mine.json",), {"train/mine.json": "test/yours.json"})


def test_folders_that_do_not_fit(write_leaf, tmp_path):
    folder = write_leaf(make_leaf({"a": make_user(0)}), "train/a_train.json")
    message = r"only train of .* has files; add the other's files, or set the input to .*raw/train, whose examples"
    with pytest.raises(DataError, match=message):
        list_sources(folder)
    assert list_sources(folder / "train") == ("a_train.json",)
    write_leaf(make_leaf({"a": make_user(0)}), "a.json")
    with pytest.raises(DataError, match="has LEAF files in itself and in its folders"):
        list_sources(folder)


def test_a_byte_order_mark_and_hidden_files_change_nothing(write_leaf, options, tmp_path):
    folder = write_leaf(make_leaf({name: make_user(seed, 20) for seed, name in enumerate("ab")}), "a.json")
    expected = run_leaf(options()).manifest
    (folder / "a.json").write_bytes(b"\xef\xbb\xbf" + (folder / "a.json").read_bytes())
    (folder / "._a.json").write_bytes(b"\0\5\x16\7")
    assert list_sources(folder) == ("a.json",)
    found = run_leaf(options(output=tmp_path / "again")).manifest
    assert (found.clients, found.shards, found.kept) == (expected.clients, expected.shards, expected.kept)


def test_a_link_to_nothing_is_not_passed_over(write_leaf):
    folder = write_leaf(make_leaf({"a": make_user(0, 20)}), "a.json")
    (folder / "b.json").symlink_to(folder / "annex")
    with pytest.raises(DataError, match=r"b\.json: a link to .*annex, which does not exist; fetch the file"):
        list_sources(folder)


def test_many_small_files_are_read_by_few_tasks_and_make_the_same_dataset(write_leaf, options, tmp_path, monkeypatch):
    users = {f"user {number:03d}": make_user(number) for number in range(200)}
    folder = write_leaf(make_leaf(users))
    one = run_leaf(options())
    (folder / "all_data_0.json").unlink()
    for number, (name, data) in enumerate(users.items()):
        write_leaf(make_leaf({name: data}), f"all_data_{number:03d}.json")
    sizes = []
    monkeypatch.setattr(
        clients, "run_dataset_job", lambda job, own: sizes.append(job.stages[0].tasks) or run_dataset_job(job, own)
    )
    many = run_leaf(options(output=tmp_path / "many"))
    # 200 / 64 is a little more than 3.
    assert list(map(len, sizes[0])) == [3] * 66 + [2]
    assert [name for task in sizes[0] for name in task] == [f"all_data_{number:03d}.json" for number in range(200)]
    for shard in one.manifest.shards:
        assert (many.output / shard.name).read_bytes() == (one.output / shard.name).read_bytes()
    assert many.manifest.clients == one.manifest.clients


@pytest.mark.parametrize(
    "x",
    [
        [[1, 0.5], [0, 3]],
        [[], []],
        [],
        [[1], [2, 3]],
        [[1, True]],
        [[1, None]],
        [[10**400, 1]],
        [[1e300, -1e300], [float("nan"), float("inf")]],
        [[2**63, 10**30]],
        [1, 2],
    ],
)
def test_examples_are_packed_together_as_one_by_one(x):
    packed, expected = leaf._pack_examples([("x", x)])["x"], [leaf._pack_example(one) for one in x]
    assert len(packed) == len(expected)
    for own, other in zip(packed, expected, strict=True):
        assert type(own) is type(other)
        np.testing.assert_array_equal(own, other)
        assert not isinstance(own, np.ndarray) or (own.dtype, own.shape) == (np.float32, other.shape)
