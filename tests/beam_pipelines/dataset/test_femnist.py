"""The FEMNIST job end to end: what it keeps, what it refuses, and that it is deterministic."""

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.options import ClientDatasetOptions
from tests.beam_pipelines.conftest import contents, dead_letters, make_leaf, make_user, run_leaf
from tests.places import ROOT
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS, Manifest, Tally
from tff_pdp.errors import ConfigError, DataError

FEMNIST = {"input_shape": (28, 28, 1), "num_classes": 62}


def images(dataset, client, split):
    return {image.tobytes() for image in dataset.load(client, split).x}


def test_every_example_comes_back(write_leaf, options):
    users = {name: make_user(seed) for seed, name in enumerate("cab")}
    write_leaf(make_leaf(users))
    summary = run_leaf(options())
    dataset = ClientDataset.open(summary.output, verify=True)
    assert dataset.client_ids == ("a", "b", "c")
    for client, data in users.items():
        parts = [dataset.load(client, split) for split in SPLITS]
        read = {(x.tobytes(), int(y)) for part in parts for x, y in zip(part.x, part.y, strict=True)}
        assert read == {
            (np.float32(x).reshape(2, 2, 1).tobytes(), y) for x, y in zip(data["x"], data["y"], strict=True)
        }
    assert summary.manifest.read == summary.manifest.kept == Tally(3, 36)
    assert Manifest.load(summary.output) == summary.manifest


ENGINES = {
    "same": {},
    "threads": {"pipeline_args": ("--direct_num_workers=2", "--direct_running_mode=multi_threading")},
    "one pipeline": {"exchange": "runner"},
    "processes": {
        "exchange": "runner",
        "pipeline_args": ("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
    },
}


# Two processes that import Beam; a pipeline of Beam's engine tests runs on them in make test.
SLOW = {"processes": pytest.mark.all}


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, id=name, marks=SLOW.get(name, ())) for name, engine in ENGINES.items()]
)
def test_same_bytes_on_every_engine(write_leaf, options, tmp_path, engine):
    bad = make_user(9)
    bad["y"][3] = 7
    write_leaf(make_leaf({name: make_user(seed) for seed, name in enumerate("abcd")}))
    write_leaf(make_leaf({"e": bad}), "all_data_1.json.gz")
    first = run_leaf(options())
    second = run_leaf(options(output=tmp_path / "again", **engine))
    assert contents(first.output) == contents(second.output)


def test_another_seed_splits_differently(write_leaf, options, tmp_path):
    write_leaf(make_leaf({"a": make_user(0, 100)}))
    first = ClientDataset.open(run_leaf(options()).output)
    second = ClientDataset.open(run_leaf(options(seed=1, output=tmp_path / "other")).output)
    assert images(first, "a", "test") != images(second, "a", "test")


def test_split_does_not_depend_on_other_examples(write_leaf, options, tmp_path):
    data = make_user(0, 60)
    write_leaf(make_leaf({"a": data}))
    full = ClientDataset.open(run_leaf(options()).output)
    half = {"x": data["x"][::-2], "y": data["y"][::-2]}
    write_leaf(make_leaf({"b": make_user(1), "a": half}))
    fewer = ClientDataset.open(run_leaf(options(output=tmp_path / "fewer")).output)
    for split in SPLITS:
        assert images(fewer, "a", split) <= images(full, "a", split)


@pytest.mark.parametrize(
    ("pixels", "label", "reason"),
    [
        ([0.0] * 3, 1, "wrong_pixel_count"),
        ([0.0, 0.0, 0.0, "1"], 1, "pixels_not_a_list_of_numbers"),
        (0.5, 1, "pixels_not_a_list_of_numbers"),
        ([0.0, 0.0, 0.0, float("nan")], 1, "pixel_not_finite"),
        ([0.0, 0.0, 0.0, 1e300], 1, "pixel_not_finite"),
        ([0.0, 0.0, 0.0, 1.5], 1, "pixel_outside_0_1"),
        ([0.0, 0.0, 0.0, -0.1], 1, "pixel_outside_0_1"),
        ([0.0] * 4, 1.5, "label_not_an_integer"),
        ([0.0] * 4, True, "label_not_an_integer"),
        ([0.0] * 4, "1", "label_not_an_integer"),
        ([0.0] * 4, float("nan"), "label_not_an_integer"),
        ([0.0] * 4, 3, "label_out_of_range"),
        ([0.0] * 4, -1, "label_out_of_range"),
    ],
)
def test_bad_example_becomes_a_dead_letter(write_leaf, options, pixels, label, reason):
    data = make_user(0)
    data["x"][5], data["y"][5] = pixels, label
    write_leaf(make_leaf({"a": data}))
    summary = run_leaf(options())
    assert summary.manifest.kept == Tally(1, 11)
    assert summary.manifest.dropped == {reason: Tally(0, 1)}
    (letter,) = dead_letters(summary.output / "dead_letters")
    assert (letter["source"], letter["client"], letter["example"]) == ("all_data_0.json", "a", 5)
    assert letter["reason"] == reason and len(letter["raw"]) <= 200


def lengths_differ(leaf):
    leaf["user_data"]["bad"]["x"].pop()
    return "x_and_y_differ_in_length", 12


def count_differs(leaf):
    leaf["num_samples"][0] = 13
    return "num_samples_differs_from_data", 12


def data_missing(leaf):
    del leaf["user_data"]["bad"]
    return "user_without_data", 12


def not_listed(leaf):
    del leaf["users"][0], leaf["num_samples"][0]
    return "user_not_in_users_list", 12


def no_labels(leaf):
    del leaf["user_data"]["bad"]["y"]
    return "user_data_without_lists_x_and_y", 12


@pytest.mark.parametrize("damage", [lengths_differ, count_differs, data_missing, not_listed, no_labels])
def test_bad_user_becomes_a_dead_letter(write_leaf, options, damage):
    leaf = make_leaf({"bad": make_user(0), "good": make_user(1)})
    reason, num_examples = damage(leaf)
    write_leaf(leaf)
    summary = run_leaf(options())
    assert summary.manifest.dropped == {reason: Tally(1, num_examples)}
    assert summary.manifest.kept == Tally(1, 12)
    (letter,) = dead_letters(summary.output / "dead_letters")
    assert (letter["client"], letter["example"], letter["num_examples"]) == ("bad", None, num_examples)


def repeated_json_key(first, second):
    return b'{"users":["a"],"num_samples":[12],"user_data":{"a":%b,"a":%b}}' % (
        json.dumps(first).encode(),
        json.dumps(second).encode(),
    )


@pytest.mark.parametrize("where", ["users", "json key", "files"])
@pytest.mark.parametrize("conflict", [False, True])
def test_copies_of_a_user(write_leaf, options, where, conflict):
    first, second = make_user(0), make_user(1 if conflict else 0)
    write_leaf(make_leaf({"good": make_user(5)}), "all_data_9.json")
    if where == "users":
        leaf = {"users": ["a", "a"], "num_samples": [12, 13 if conflict else 12], "user_data": {"a": first}}
        write_leaf(leaf)
    elif where == "json key":
        write_leaf(repeated_json_key(first, second))
    else:
        write_leaf(make_leaf({"a": first}))
        write_leaf(make_leaf({"a": second}), "all_data_1.json.gz")
    manifest = run_leaf(options()).manifest
    if conflict:
        assert manifest.dropped == {"copies_of_user_differ": Tally(2, 24)} and set(manifest.clients) == {"good"}
    else:
        assert manifest.dropped == {"identical_copy_of_user": Tally(1, 12)} and set(manifest.clients) == {"a", "good"}


def test_small_clients_are_dropped_and_counted(write_leaf, options):
    write_leaf(make_leaf({"small": make_user(0, 4), "empty": make_user(1, 0), "big": make_user(2, 20)}))
    manifest = run_leaf(options(min_examples_per_client=5, max_bad_fraction=0)).manifest
    assert manifest.dropped == {"client_below_min_examples": Tally(2, 4)}


def test_client_without_train_examples_is_dropped(write_leaf, options):
    write_leaf(make_leaf({"a": make_user(0, 2), "b": make_user(1, 200)}))
    manifest = run_leaf(options(test_fraction=0.97, validation_fraction=0)).manifest
    assert manifest.dropped == {"client_without_train_examples": Tally(1, 2)}


def test_too_much_bad_input_fails_and_keeps_the_dead_letters(write_leaf, options, tmp_path):
    data = make_user(0)
    data["y"][0] = 99
    write_leaf(make_leaf({"a": data}))
    with pytest.raises(DataError, match=r"8\.3% of 12 examples.*label_out_of_range: 0 users, 1 examples.*kept in"):
        run_leaf(options(max_bad_fraction=0.01))
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["clients.dead_letters", "raw"]
    assert not (tmp_path / ".clients.unfinished").exists()
    assert len(dead_letters(tmp_path / "clients.dead_letters")) == 1


def test_dead_letters_replace_nothing_but_dead_letters(write_leaf, options, tmp_path):
    data = make_user(0)
    data["y"][0] = 99
    write_leaf(make_leaf({"a": data}))
    for _ in range(2):
        with pytest.raises(DataError, match="cannot be used"):
            run_leaf(options(max_bad_fraction=0.01, dead_letters=tmp_path / "letters"))
    (tmp_path / "letters" / "thesis.tex").touch()
    with pytest.raises(DataError, match="not a folder of dead letters only"):
        run_leaf(options(max_bad_fraction=0.01, dead_letters=tmp_path / "letters"))
    assert (tmp_path / "letters" / "thesis.tex").exists()


def test_no_client_left_fails(write_leaf, options):
    write_leaf(make_leaf({"a": make_user(0)}))
    with pytest.raises(DataError, match="no client is left"):
        run_leaf(options(min_examples_per_client=50))


GOOD = json.dumps(make_leaf({"a": make_user(0)})).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.json",
            GOOD[:-40],
            r"bad\.json: invalid or truncated JSON at line 1, column \d+ \(character \d+ of",
        ),
        ("bad.json", b"", r"bad\.json: invalid or truncated JSON at line 1, column 1"),
        ("bad.json", b"\xff{}", r"bad\.json: not UTF-8 text at byte 0"),
        ("bad.json", b"[" * 100_000, r"bad\.json: not LEAF JSON: nested too deeply"),
        ("bad.json", b"[]", r"bad\.json: not LEAF JSON: the top level is a list"),
        ("bad.json", b'{"users": [], "num_samples": []}', r"bad\.json: not LEAF JSON: no top-level key 'user_data'"),
        ("bad.json", b'{"users":[],"users":[],"num_samples":[],"user_data":{}}', "'users' occurs more than once"),
        ("bad.json", b'{"users":[1],"num_samples":[1],"user_data":{}}', "'users' must be a list of strings"),
        ("bad.json", b'{"users":["a"],"num_samples":[],"user_data":{}}', "'num_samples' must be a list with one entry"),
        ("bad.json", b'{"users":[],"num_samples":[],"user_data":[]}', "'user_data' must be an object, not a list"),
        ("bad.json", rb'{"users":["\ud800"],"num_samples":[1],"user_data":{}}', "not valid Unicode"),
    ],
)
def test_file_that_is_not_leaf_json_fails_the_job(write_leaf, options, tmp_path, name, content, message):
    write_leaf(GOOD)
    write_leaf(content, name)
    with pytest.raises(DataError, match=message):
        run_leaf(options())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".clients.lock", "raw"]


def test_truncated_gzip_fails_the_job(write_leaf, options):
    path = write_leaf(GOOD, "bad.json.gz") / "bad.json.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"bad\.json\.gz: truncated or damaged gzip"):
        run_leaf(options())


def test_missing_and_empty_folders(options, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        run_leaf(options())
    (tmp_path / "raw").mkdir()
    with pytest.raises(DataError, match=r"no \.json or \.json\.gz file"):
        run_leaf(options())


@pytest.mark.parametrize(
    "change", [{"test_fraction": 0.9}, {"num_shards": 0}, {"input_shape": (0, 2, 1)}, {"max_bad_fraction": 2}]
)
def test_options_out_of_range(options, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        run_leaf(options(**change))


def test_finished_output_is_skipped_refused_or_replaced(write_leaf, options):
    write_leaf(GOOD)
    first = run_leaf(options())
    again = run_leaf(options())
    assert again == dataclasses.replace(first, skipped=True)
    with pytest.raises(DataError, match="--overwrite"):
        run_leaf(options(seed=1))
    assert ClientDataset.open(first.output).manifest.seed == 0
    run_leaf(options(seed=1, overwrite=True))
    assert ClientDataset.open(first.output, verify=True).manifest.seed == 1


@pytest.mark.parametrize("instant", ["before", "between", "after"])
def test_a_job_that_was_killed_while_it_replaced_a_dataset_is_brought_to_its_end(
    write_leaf, options, tmp_path, instant
):
    write_leaf(GOOD)
    output, staging, replaced = (tmp_path / name for name in ("clients", ".clients.unfinished", ".clients.replaced"))
    run_leaf(options())
    output.rename(tmp_path / "old")
    new = run_leaf(options(seed=1))
    (tmp_path / "old").rename(replaced)
    written = (output / "manifest.json").stat().st_mtime_ns
    if instant == "before":
        output.rename(staging)
        replaced.rename(output)
    elif instant == "between":
        output.rename(staging)
    again = run_leaf(options(seed=1, overwrite=instant == "before"))
    # What was complete is not made again.
    assert again == dataclasses.replace(new, skipped=instant != "before")
    assert ((output / "manifest.json").stat().st_mtime_ns == written) == (instant != "before")
    assert ClientDataset.open(output, verify=True).manifest.seed == 1
    assert not staging.exists() and not replaced.exists()


def test_the_dataset_that_was_replaced_is_back_where_the_new_one_was_lost(write_leaf, options, tmp_path):
    write_leaf(GOOD)
    summary = run_leaf(options())
    summary.output.rename(tmp_path / ".clients.replaced")
    assert run_leaf(options()) == dataclasses.replace(summary, skipped=True)
    assert not (tmp_path / ".clients.replaced").exists()


def test_overwrite_never_removes_what_is_not_a_dataset(write_leaf, options, tmp_path):
    write_leaf(GOOD)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "thesis.tex").touch()
    with pytest.raises(DataError, match="is not a client dataset"):
        run_leaf(options(overwrite=True))
    assert (tmp_path / "clients" / "thesis.tex").exists()


def test_killed_job_leaves_nothing_that_looks_complete(write_leaf, options, tmp_path):
    write_leaf(make_leaf({str(seed): make_user(seed, 500) for seed in range(60)}))
    arguments = ["--input", str(tmp_path / "raw"), "--output", str(tmp_path / "clients"), "--num_shards", "3"]
    arguments += ["--input_shape", "2", "2", "1", "--num_classes", "3"]
    job = subprocess.Popen(
        [sys.executable, "-m", "beam_pipelines", "femnist", *arguments],
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    staging = tmp_path / ".clients.unfinished"
    deadline = time.monotonic() + 60
    # The folder is there a moment before it is locked; what is in it is written later.
    while not any(tmp_path.glob(".clients.unfinished/*")) and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert staging.exists()
    with pytest.raises(DataError, match=rf"process {job.pid} writes to {tmp_path}/clients: wait"):
        run_leaf(options())
    job.send_signal(signal.SIGKILL)
    job.wait(30)
    assert staging.exists() and not (tmp_path / "clients").exists()
    for folder in (staging, tmp_path / "clients"):
        with pytest.raises(DataError):
            ClientDataset.open(folder)
    assert run_leaf(options()).manifest.kept == Tally(60, 30_000)
    assert not staging.exists()


@pytest.fixture
def real_writers():
    """The folder of LEAF files of real writers; without one, the test is skipped."""
    root = os.environ.get("TFF_PDP_DATA")
    if not root:
        pytest.skip("TFF_PDP_DATA is not set: no folder with real data")
    return Path(root) / "femnist_digits_leaf" / "all_data"


def test_real_writers(real_writers, tmp_path):
    manifest = run_leaf(ClientDatasetOptions(real_writers, tmp_path / "clients", **FEMNIST)).manifest
    assert manifest.read == manifest.kept == Tally(24, 2671)
    dataset = ClientDataset.open(tmp_path / "clients", verify=True)
    x = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert len(x) == manifest.num_examples["train"]
    assert x.min() == 0 and x.max() == 1


def test_real_writers_in_train_and_test(real_writers, write_leaf, tmp_path):
    sizes = {"train": 0, "test": 0}
    for path in sorted(real_writers.iterdir()):
        leaf = json.loads(gzip.decompress(path.read_bytes()))
        for side in sizes:
            # As LEAF divides: nine tenths of each user's examples, rounded down, are for training.
            users = {}
            for user, data in leaf["user_data"].items():
                cut = int(0.9 * len(data["y"]))
                chosen = slice(cut) if side == "train" else slice(cut, None)
                users[user] = {"x": data["x"][chosen], "y": data["y"][chosen]}
                sizes[side] += len(users[user]["y"])
            name = path.name.removesuffix(".json.gz")
            write_leaf(make_leaf(users), f"{side}/{name}_niid_0_keep_0_{side}_9.json.gz")
    options = ClientDatasetOptions(tmp_path / "raw", tmp_path / "clients", validation_fraction=0.0, **FEMNIST)
    manifest = run_leaf(options).manifest
    assert manifest.read == manifest.kept == Tally(24, 2671)
    assert manifest.num_examples == {**sizes, "validation": 0}
