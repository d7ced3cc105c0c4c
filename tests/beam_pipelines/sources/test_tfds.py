"""Datasets of TensorFlow Datasets: clients by a feature and by a division, other sizes of images, numbers, refusals."""

import numpy as np
import pytest

from beam_pipelines.sources.images import Images, resized
from beam_pipelines.sources.tfds import clients_by_owner
from tests.beam_pipelines.sources.built_tfds import LETTERS, WRITERS, Letters, Portraits, build, letter, portrait
from tff_pdp.data.manifest import Tally
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.registry.records import RecordKey, records_of_dataset

BY_WRITER = {
    "kind": "tfds",
    "input": "letters",
    "input_shape": [4, 4, 1],
    "num_classes": 4,
    "test_split": "test",
    "validation_fraction": 0.25,
    "exact_split": True,
    "min_examples_per_client": 1,
    "partition": {"kind": "feature", "client_feature": "writer"},
}
BY_PERSON = {
    "kind": "tfds",
    "input": "portraits",
    "input_shape": [3, 3, 3],
    "num_classes": 2,
    "label": "attributes/Smiling",
    "exact_split": True,
    "partition": {"kind": "feature", "client_feature": "person"},
}
DIRICHLET = {"kind": "dirichlet", "num_clients": 4, "concentration": 0.5}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    build(Letters, data_dir)
    build(Portraits, data_dir)
    return data_dir


def numbers(dataset, client, split):
    """The numbers of the letters, from their first pixels."""
    return np.round(dataset.load(client, split).x[:, 0, 0, 0] * 255).astype(int)


def test_writers_are_clients_with_their_own_test_images(prepare, built):
    dataset = prepare(**BY_WRITER, data_dir=str(built))
    manifest = dataset.manifest
    assert manifest.clients == {writer: {"train": 12, "validation": 4, "test": 4} for writer in WRITERS}
    assert manifest.read == manifest.kept == Tally(3, 60)
    assert manifest.class_names == LETTERS
    recorded = {"source": "tfds", "builder": "letters/1.2.0", "partition": "feature", "test_fraction": None}
    assert {**recorded, "client_feature": "writer"}.items() <= manifest.parameters.items()
    for place, writer in enumerate(WRITERS):
        found = {split: numbers(dataset, writer, split) for split in ("train", "validation", "test")}
        own = [number for number in range(60) if number // 4 % 3 == place]
        assert sorted(found["test"]) == [number for number in own if number >= 48]
        assert sorted([*found["train"], *found["validation"]]) == [number for number in own if number < 48]
        for split, present in found.items():
            examples = dataset.load(writer, split)
            np.testing.assert_array_equal(examples.y, present % 4)
            expected = np.stack([letter(number) for number in present]) / np.float32(255)
            np.testing.assert_array_equal(examples.x, expected.astype(np.float32))


def test_the_same_clients_from_a_folder_and_from_array_records(prepare, built, tmp_path):
    by_name = prepare(**BY_WRITER, data_dir=str(built)).manifest
    folder = build(Letters, tmp_path / "more", "array_record")
    for place in (built / "letters" / "1.2.0", folder):
        other = prepare(**{**BY_WRITER, "input": str(place)}).manifest
        assert other.clients == by_name.clients
        assert [shard.sha256 for shard in other.shards] == [shard.sha256 for shard in by_name.shards]


def test_people_of_all_sizes_and_an_inner_label(prepare, built):
    dataset = prepare(**BY_PERSON, data_dir=str(built))
    manifest = dataset.manifest
    assert {client: sum(counts.values()) for client, counts in manifest.clients.items()} == {
        "person_00007": 24,
        "person_00120": 16,
    }
    # A fifth of 24 and of 16, rounded up.
    assert {client: counts["test"] for client, counts in manifest.clients.items()} == {
        "person_00007": 5,
        "person_00120": 4,
    }
    assert manifest.class_names is None
    seen = set()
    for client in manifest.clients:
        for split in ("train", "validation", "test"):
            examples = dataset.load(client, split)
            found = np.round(examples.x[:, 0, 0, 0] * 255).astype(int)
            seen.update(found.tolist())
            np.testing.assert_array_equal(examples.y, found % 3 == 0)
            assert (found < 24).all() == (client == "person_00007")
            # One colour stays one colour.
            np.testing.assert_array_equal(examples.x, np.broadcast_to(examples.x[:, :1, :1], examples.x.shape))
    assert seen == set(range(40))


@pytest.mark.parametrize("test_partition", ["same", "uniform"])
def test_dirichlet_mixes_of_all_letters(prepare, built, test_partition):
    data = {**BY_WRITER, "partition": DIRICHLET, "test_partition": test_partition}
    dataset = prepare(**data, data_dir=str(built))
    assert list(dataset.client_ids) == [f"silo_{client:03d}" for client in range(4)]
    assert list(dataset.manifest.clients.values()) == [{"train": 9, "validation": 3, "test": 3}] * 4
    found = [numbers(dataset, client, split) for client in dataset.client_ids for split in ("train", "validation")]
    assert sorted(np.concatenate(found)) == [*range(48)]
    assert sorted(np.concatenate([numbers(dataset, client, "test") for client in dataset.client_ids])) == [
        *range(48, 60)
    ]
    expected = {"partition": "dirichlet", "num_clients": 4, "concentration": 0.5, "test_partition": test_partition}
    assert expected.items() <= dataset.manifest.parameters.items()
    assert prepare(**data, data_dir=str(built), seed=1).manifest.shards != dataset.manifest.shards


def test_numbers_of_several_features_for_a_regression(prepare, built):
    data = {**BY_PERSON, "feature": ["landmarks", "person"], "label": "attributes/Age", "input_shape": [3]}
    dataset = prepare(
        **{**data, "num_classes": 0, "test_fraction": 0.0, "validation_fraction": 0.0}, data_dir=str(built)
    )
    for client, person, start, stop in (("person_00007", 7, 0, 24), ("person_00120", 120, 24, 40)):
        examples = dataset.load(client, "train")
        order = np.argsort(examples.x[:, 0])
        values = np.arange(start, stop, dtype=np.float32)
        np.testing.assert_array_equal(examples.x[order], np.stack([values, -values, np.full_like(values, person)], 1))
        np.testing.assert_array_equal(examples.y[order], values / 2)


def test_slices_of_splits_and_swapped_axes(prepare, built):
    data = {**BY_WRITER, "train_split": "train[:24]+test", "test_split": None, "swap_axes": True}
    dataset = prepare(**{**data, "test_fraction": 0.0, "validation_fraction": 0.0}, data_dir=str(built))
    assert dataset.manifest.read.examples == 36
    x = dataset.load("ada", "train").x
    # The bright row has become a column.
    assert (x[:, :, 0] > 0).mean() > 0.9 and (x[:, :, 1:] == 0).all()


def test_only_clients_of_a_feature_are_the_same_people_elsewhere(prepare, built):
    key = RecordKey(b"k" * 32)
    named = records_of_dataset(key, prepare(**BY_WRITER, data_dir=str(built)), ("train",))
    divided = records_of_dataset(key, prepare(**{**BY_WRITER, "partition": DIRICHLET}, data_dir=str(built)), ("train",))
    assert (named.are_named, divided.are_named) == (True, False)
    # The files that both were made of, beside the arrays that only one was made of.
    assert len(set(named.sources) & set(divided.sources)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature": "img"}, "data.feature: no feature 'img'; known: image, label, writer"),
        ({"label": "image/x"}, "data.label: no feature 'image/x'; known: image"),
        ({"label": "writer"}, r"data.label: 'writer' has type .* needed is one whole number or truth value"),
        ({"feature": "writer"}, "data.feature: 'writer' has type .* needed are numbers of a fixed shape"),
        ({"num_classes": 10}, r"\[4, 4, 1\] and 10; tfds has \[4, 4, 1\] and 4"),
        ({"input_shape": [16]}, r"data.input_shape is \[16\]; feature image has images, which need height, width and"),
        ({"feature": "label", "input_shape": [2]}, r"\[2\] and 4; tfds has \[1\] and 4"),
        (
            {"feature": "label", "input_shape": [1], "swap_axes": True},
            "swap_axes is for images; feature label has none",
        ),
        ({"test_split": "dev"}, r"letters/1.2.0 in .*: no split 'dev': .*; splits: test, train"),
        (
            {"partition": {"kind": "feature", "client_feature": "image"}},
            r"client_feature: 'image' has type uint8 and shape \[4, 4, 1\]; needed is one text",
        ),
        ({"test_partition": "uniform"}, "test_partition uniform needs a test_split, and clients that are not given"),
        ({"partition": {"kind": "writer"}}, "data.partition.kind must be one of feature, classes, dirichlet, "),
    ],
)
def test_settings_that_do_not_fit_the_builder(prepare, built, change, message):
    with pytest.raises(ConfigError, match=message):
        prepare(**{**BY_WRITER, **change}, data_dir=str(built))


def test_a_group_of_features_is_no_label(prepare, built):
    with pytest.raises(ConfigError, match="'attributes' has inner features; name one of attributes/Age, attributes/S"):
        prepare(**{**BY_PERSON, "label": "attributes"}, data_dir=str(built))


def test_datasets_that_are_not_there(prepare, built, tmp_path):
    with pytest.raises(DataError, match=r"data.input mnist: cannot be opened: .*; name a prepared dataset, with data"):
        prepare(**{**BY_WRITER, "input": "mnist"}, data_dir=str(built))
    with pytest.raises(DataError, match=r"letters: no features.json in it; .* prepared versions in it: 1\.2\.0$"):
        prepare(**{**BY_WRITER, "input": str(built / "letters")})
    with pytest.raises(DataError, match=r"nowhere: no features.json in it; data.input must be the folder of one prep"):
        prepare(**{**BY_WRITER, "input": str(tmp_path / "nowhere")})


def test_a_known_builder_runs_only_if_asked_for(prepare, tmp_path):
    # The class `Letters` is known by its name, and needs no network.
    data_dir = tmp_path / "empty"
    with pytest.raises(DataError, match=r"or set data\.download to true"):
        prepare(**BY_WRITER, data_dir=str(data_dir))
    assert not data_dir.exists()
    dataset = prepare(**BY_WRITER, data_dir=str(data_dir), download=True)
    assert dataset.manifest.kept == Tally(3, 60)
    assert (data_dir / "letters" / "1.2.0" / "dataset_info.json").is_file()


def test_one_feature_of_numbers_keeps_its_shape(prepare, built):
    data = {**BY_PERSON, "feature": "landmarks", "input_shape": [2]}
    assert prepare(**data, data_dir=str(built)).manifest.features.shape == (2,)
    with pytest.raises(ConfigError, match=r"are \[3\] and 2; tfds has \[2\] and 2"):
        prepare(**{**data, "input_shape": [3]}, data_dir=str(built))


def test_a_damaged_file_is_named(prepare, tmp_path):
    folder = build(Letters, tmp_path / "own")
    (file,) = folder.glob("*train.tfrecord*")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"letters/1.2.0 in .*: split 'train', example \d+ \(the first is 0\): "):
        prepare(**{**BY_WRITER, "input": str(folder)})


def test_clients_by_owner_keep_the_order_of_their_examples():
    train, test = (Images(np.arange(count, dtype=np.float32)[:, np.newaxis], np.arange(count)) for count in (5, 2))
    owners = (np.array(["b", "a", "b", "a", "b"], object), np.array(["c", "a"], object))
    clients = {client.name: client for client in clients_by_owner(train, owners[0], test, owners[1])}
    assert {name: client.x.ravel().tolist() for name, client in clients.items()} == {
        "a": [1, 3, 1],
        "b": [0, 2, 4],
        "c": [0],
    }
    stated = {name: client.is_test.tolist() for name, client in clients.items() if client.is_test is not None}
    assert stated == {"a": [False, False, True], "b": [False] * 3, "c": [True]}


def test_resized_by_hand():
    image = np.array([[0, 10, 100, 100], [20, 30, 100, 100]], np.uint8)[..., np.newaxis]
    assert resized(image, (1, 2, 1))[..., 0].tolist() == [[15, 100]]
    assert resized(image, (1, 2, 3)).tolist() == [[[15] * 3, [100] * 3]]
    assert resized(image, (2, 4, 1)) is image
    # Grey of ITU-R 601-2: 0.299 R + 0.587 G + 0.114 B.
    assert resized(portrait(0)[:1, :1], (1, 1, 1)).ravel().tolist() == [146]
    with pytest.raises(DataError, match=r"an image of shape \[2, 4, 2\] cannot be resized"):
        resized(image.repeat(2, axis=2), (1, 2, 1))
