"""CelebA by person: both text files, images drawn here, and what is missing or damaged."""

import collections
import gzip
import json
import lzma

import numpy as np
import pytest
from PIL import Image

from beam_pipelines.records import Reason
from beam_pipelines.sources import celeba
from beam_pipelines.sources.celeba import (
    ATTRIBUTE_FILE,
    IDENTITY_FILE,
    IMAGE_FOLDER,
    PARTITION_FILE,
    Celeba,
    read_partitions,
    read_people,
)
from beam_pipelines.sources.images import hash_images
from tff_pdp.data.manifest import Tally
from tff_pdp.errors import ConfigError, DataError

PEOPLE = {"000001.jpg": 2880, "000002.jpg": 7, "000003.jpg": 2880, "000004.jpg": 7}
SMILING = {"000001.jpg": -1, "000002.jpg": 1, "000003.jpg": 1, "000004.jpg": 1}


def write_text(folder, people=PEOPLE, smiling=SMILING, end="\r\n", count=None):
    folder.mkdir(exist_ok=True)
    identities = "".join(f"{image} {person}{end}" for image, person in people.items())
    (folder / IDENTITY_FILE).write_bytes(identities.encode())
    lines = [str(len(smiling) if count is None else count), "5_o_Clock_Shadow Smiling Young "]
    # Padded to two places, as the original is.
    lines += [f"{image} -1 {value:2d}  1" for image, value in smiling.items()]
    (folder / ATTRIBUTE_FILE).write_bytes("".join(line + end for line in lines).encode())
    return folder


def write_image(folder, name, pixels):
    path = folder / IMAGE_FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="JPEG", quality=95)
    return path


# How many levels of 255 JPEG of quality 95 may be off over an area of one colour. It keeps the sum over a block to 2,
# which is a mean to an eighth of that, luminance and both colours as whole levels; a channel is luminance and up to
# 1.772 of a colour, in whole levels.
GREY = 1 / 8 + 1 / 2 + 1 / 2
COLOUR = (1 / 8 + 1 / 2) * (1 + 1.772) + 1 / 2


def halves(left, right):
    """An image of CelebA's size whose left and right half have one colour each."""
    pixels = np.empty((218, 178, 3), np.uint8)
    pixels[:, :89], pixels[:, 89:] = left, right
    return pixels


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_people(tmp_path, end):
    people = read_people(write_text(tmp_path, end=end), "Smiling")
    assert people == {
        "identity_00007": [("000002.jpg", 1), ("000004.jpg", 1)],
        "identity_02880": [("000001.jpg", 0), ("000003.jpg", 1)],
    }
    assert list(people) == sorted(people)
    assert {label for images in read_people(tmp_path, "5_o_Clock_Shadow").values() for _, label in images} == {0}


def read(folder, **options):
    """All people of all parts, sorted, and the raw data."""
    raw = Celeba(kind="celeba", input=str(folder), **options).build(folder)
    users = [user for unit in raw.units for user in raw.read_users(folder / unit)]
    return sorted(users, key=lambda user: user.client), raw


def test_images_become_averages(tmp_path):
    write_text(tmp_path)
    for image in PEOPLE:
        write_image(tmp_path, image, halves((200, 100, 0), (0, 0, 250)))
    (_, second), _ = read(tmp_path, input_shape=(1, 2, 3))
    assert (second.client, second.y, second.num_samples) == ("identity_02880", [0, 1], 2)
    for x in second.x:
        assert x.dtype == np.float32 and x.min() >= 0 and x.max() <= 1
        # Of 89 columns, two beside the edge have colours mixed by up to a half.
        np.testing.assert_allclose(x * 255, [200, 100, 0, 0, 0, 250], atol=COLOUR + 2 * 250 / 2 / 89)
    stripes = np.where(np.arange(178) % 8 < 4, 0, 240).astype(np.uint8)
    write_image(tmp_path, "000002.jpg", np.broadcast_to(stripes[:, np.newaxis], (218, 178, 3)))
    (first, _), _ = read(tmp_path, input_shape=(2, 1, 1))
    # 22 whole stripes and one half, which is black.
    # An edge in a block's middle has four waves, kept as whole numbers of 1, 2, 4 and 6, so each off by half of that
    # at most, of which a pixel takes 1 / (4 sqrt 2). Black that is off is lighter, and black is every other pixel.
    lighter = (1 + 2 + 4 + 6) / 2 / (4 * 2**0.5) / 2
    np.testing.assert_allclose(first.x[0] * 255, [240 * 88 / 178] * 2, atol=GREY + lighter)


def test_tasks_read_parts_of_the_people(tmp_path, monkeypatch):
    names = [f"{number:06d}.jpg" for number in range(1, 13)]
    write_text(tmp_path, {name: int(name[:6]) % 5 for name in names}, dict.fromkeys(names, 1))
    for name in names:
        write_image(tmp_path, name, halves((int(name[:6]) * 20,) * 3, (0, 0, 0)))
    whole, raw = read(tmp_path, input_shape=(2, 2, 1))
    assert raw.units == (f"{IDENTITY_FILE}:0/1",) and raw.files == (IDENTITY_FILE, ATTRIBUTE_FILE)
    monkeypatch.setattr(celeba, "_IMAGES_PER_TASK", 4)
    divided, raw = read(tmp_path, input_shape=(2, 2, 1))
    assert raw.units == tuple(f"{IDENTITY_FILE}:{part}/3" for part in range(3))
    assert [len(list(raw.read_users(tmp_path / unit))) for unit in raw.units] == [2, 2, 1]
    assert [user.fingerprint() for user in divided] == [user.fingerprint() for user in whole]
    assert [user.num_samples for user in whole] == [2, 3, 3, 2, 2]


def test_what_cannot_be_read_is_kept_aside(prepare, tmp_path):
    names = [f"{number:06d}.jpg" for number in range(1, 21)]
    folder = write_text(tmp_path / "raw", dict.fromkeys(names, 3), dict.fromkeys(names, 1))
    for number, name in enumerate(names):
        write_image(folder, name, halves((number * 10,) * 3, (0, 0, 0)))
    images = folder / IMAGE_FOLDER
    (images / names[0]).unlink()
    (images / names[1]).write_bytes((images / names[1]).read_bytes()[:1500])
    (images / names[2]).write_bytes(b"<html>")
    Image.fromarray(halves((1, 1, 1), (2, 2, 2))).save(images / names[3], format="PNG")
    data = {"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, "max_bad_fraction": 0.2}
    dataset = prepare(**data)
    assert sum(dataset.manifest.clients["identity_00003"].values()) == 16
    assert dataset.manifest.dropped[Reason.UNREADABLE_IMAGE].examples == 4
    lines = [line for path in dataset.path.glob("dead_letters/*") for line in path.read_text().splitlines()]
    letters = sorted((json.loads(line) for line in lines), key=lambda letter: letter["example"])
    assert [json.loads(letter["raw"])[:21] for letter in letters] == [
        "000001.jpg: no such f",
        "000002.jpg: damaged: ",
        "000003.jpg: not a JPE",
        "000004.jpg: not a JPE",
    ]
    assert not any(str(tmp_path) in line for line in lines)
    with pytest.raises(DataError, match=r"20\.0% of 20 examples cannot be used"):
        prepare(**{**data, "max_bad_fraction": 0.1})


def write_partition(folder, sides, end="\n"):
    (folder / PARTITION_FILE).write_bytes("".join(f"{image} {side}{end}" for image, side in sides.items()).encode())


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_official_partition(prepare, tmp_path, end):
    names = [f"{number:06d}.jpg" for number in range(1, 9)]
    folder = write_text(tmp_path / "raw", {name: int(name[:6]) % 4 for name in names}, dict.fromkeys(names, 1))
    for name in names:
        write_image(folder, name, halves((int(name[:6]) * 20,) * 3, (0, 0, 0)))
    # Identities 1 and 3 are for training, 0 for validation; 2 has an image on each side, which no original has.
    write_partition(folder, dict(zip(names, "02010000", strict=True)) | {"000004.jpg": 1, "000008.jpg": 1}, end)
    data = {"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, "min_examples_per_client": 1}
    manifest = prepare(**data, split="by_image_partition").manifest
    assert manifest.clients == {
        "identity_00000": {"train": 0, "validation": 2, "test": 0},
        "identity_00001": {"train": 2, "validation": 0, "test": 0},
        "identity_00002": {"train": 1, "validation": 0, "test": 1},
        "identity_00003": {"train": 2, "validation": 0, "test": 0},
    }
    unused = {"test_fraction": None, "validation_fraction": None, "split": "by_image_partition"}
    assert unused.items() <= manifest.parameters.items()
    assert [source.name for source in manifest.sources] == [IDENTITY_FILE, ATTRIBUTE_FILE, PARTITION_FILE]


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({**dict.fromkeys(PEOPLE, 0), "000002.jpg": 3}, r"line 2: must be the name of an image and 0, 1 or 2"),
        ({"000001.jpg": 0}, r"lacks image 000002\.jpg of identity_CelebA\.txt"),
    ],
)
def test_partition_that_is_damaged(tmp_path, sides, message):
    people = read_people(write_text(tmp_path), "Smiling")
    write_partition(tmp_path, sides)
    with pytest.raises(DataError, match=rf"list_eval_partition\.txt: .*{message}"):
        read_partitions(tmp_path / PARTITION_FILE, people)


def write_leaf(path, images, label=int):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": list(ones), "y": [label(y) for y in ones.values()]} for user, ones in images.items()}
    sizes = [len(ones) for ones in images.values()]
    path.write_text(json.dumps({"users": list(images), "num_samples": sizes, "user_data": data}))


@pytest.mark.parametrize("label", [int, float])
def test_leaf_json(prepare, tmp_path, label):
    train = {"7": {"000001.jpg": 0, "000002.jpg": 1}, "12": {"000003.jpg": 1, "../000001.jpg": 1}}
    test = {"7": {"000004.jpg": 1}, "12": {"000005.jpg": 0, "000006.jpg": 0}}
    for name in range(1, 6):
        write_image(tmp_path / "raw", f"00000{name}.jpg", halves((name * 20,) * 3, (0, 0, 0)))
    write_leaf(tmp_path / "raw" / "train" / "all_data_niid_1_keep_5_train_8.json", train, label)
    write_leaf(tmp_path / "raw" / "test" / "all_data_niid_1_keep_5_test_8.json", test, label)
    data = {"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, "min_examples_per_client": 1}
    dataset = prepare(**data, max_bad_fraction=1.0, validation_fraction=0.0)
    assert dataset.manifest.clients == {
        "12": {"train": 1, "validation": 0, "test": 1},
        "7": {"train": 2, "validation": 0, "test": 1},
    }
    assert dataset.manifest.read == Tally(2, 7)
    assert dataset.manifest.dropped == {
        Reason.UNREADABLE_IMAGE: Tally(0, 1),
        Reason.PIXELS_NOT_NUMBERS: Tally(0, 1),
    }
    np.testing.assert_allclose(dataset.load("12", "test").x[0, :, 0, 0] * 255, 100, atol=GREY)
    assert dataset.load("12", "test").y.tolist() == [0]


def test_leaf_json_has_one_attribute_and_its_own_split(tmp_path):
    write_leaf(tmp_path / "all_data.json", {"7": {"000001.jpg": 0}})
    for option in ({"attribute": "Young"}, {"split": "by_image_partition"}):
        with pytest.raises(ConfigError, match=r"has LEAF's JSON, which allows only attribute 'Smiling'"):
            read(tmp_path, **option)
    with pytest.raises(DataError, match="no folder img_align_celeba in it"):
        read(tmp_path)
    with pytest.raises(DataError, match="nowhere: no such folder; `images` must be"):
        read(tmp_path, images=str(tmp_path / "nowhere"))
    write_image(tmp_path / "elsewhere", "000001.jpg", halves((10,) * 3, (10,) * 3))
    ((user,), _) = read(tmp_path, input_shape=(1, 1, 1), images=str(tmp_path / "elsewhere" / IMAGE_FOLDER))
    np.testing.assert_allclose(user.x[0] * 255, [10], atol=GREY)


def test_images_are_part_of_what_decides_the_dataset(tmp_path):
    write_text(tmp_path)
    images = sorted(PEOPLE)
    for image in images:
        write_image(tmp_path, image, halves((1, 1, 1), (9, 9, 9)))
    folder = tmp_path / IMAGE_FOLDER
    first = hash_images(folder, images)
    assert hash_images(folder, images) == first
    write_image(tmp_path, images[1], halves((1, 1, 1), (90, 9, 9)))
    second = hash_images(folder, images)
    (folder / images[1]).unlink()
    assert len({first, second, hash_images(folder, images)}) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"attribute": "Grinning"}, "no attribute 'Grinning'; known: 5_o_Clock_Shadow, Smiling, Young"),
        ({"split": "by_name"}, "data.split must be one of by_image_partition, random, not 'by_name'"),
        ({"input_shape": [64]}, r"data.input_shape must be a list of 3, each a whole .* of at least 1, not \[64\]"),
        (
            {"input_shape": [8, 8, 4]},
            r"data: input_shape must be \[height, width, 3 or 1\], not \[8, 8, 4\]",
        ),
        ({"num_classes": 62}, r"and 62; celeba has \[8, 8, 3\] and 2"),
    ],
)
def test_settings_that_do_not_fit(prepare, tmp_path, data, message):
    write_text(tmp_path / "raw")
    with pytest.raises(ConfigError, match=message):
        prepare(**{"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, **data})


@pytest.mark.parametrize(
    ("people", "smiling", "count", "message"),
    [
        (PEOPLE, SMILING, 5, r"list_attr_celeba\.txt: 4 images, but the first line states 5"),
        (PEOPLE, SMILING, "", r"list_attr_celeba\.txt: lines 1 and 2 must be"),
        (
            PEOPLE,
            {**SMILING, "000002.jpg": 0},
            None,
            r"list_attr_celeba\.txt: line 4: must be the name of an image",
        ),
        (PEOPLE, {"../../a.jpg": 1}, None, r"list_attr_celeba\.txt: line 3: must be the name of an image"),
        ({**PEOPLE, "000002.jpg": "7 8"}, SMILING, None, r"identity_CelebA\.txt: line 2: must be the name of an image"),
        ({**PEOPLE, "000005.jpg": 1}, SMILING, None, r"identity_CelebA\.txt: line 5: 000005\.jpg is not in list_attr"),
        ({"000001.jpg": 1}, SMILING, None, r"identity_CelebA\.txt: lacks image 000002\.jpg of list_attr_celeba\.txt"),
        ({**PEOPLE, "000005\xff": 1}, SMILING, None, r"identity_CelebA\.txt: cannot be read as text"),
    ],
)
def test_text_files_that_are_damaged(tmp_path, people, smiling, count, message):
    write_text(tmp_path, people, smiling, count=count)
    with pytest.raises(DataError, match=message):
        read_people(tmp_path, "Smiling")


def test_an_image_named_twice(tmp_path):
    path = write_text(tmp_path) / IDENTITY_FILE
    path.write_text(path.read_text() + "\n000002.jpg 9\n")
    with pytest.raises(DataError, match=r"line 6: 000002\.jpg occurs a second time"):
        read_people(tmp_path, "Smiling")


def test_missing_files(prepare, tmp_path):
    data = {"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2}
    folder = write_text(tmp_path / "raw")
    with pytest.raises(DataError, match="raw: no folder img_align_celeba in it"):
        prepare(**data)
    (folder / IDENTITY_FILE).unlink()
    with pytest.raises(DataError, match=r"identity_CelebA\.txt: no such file; data\.input must be CelebA's folder"):
        prepare(**data)


def unpack(real_data, folder):
    """The original text files, in a folder of their own."""
    for name, suffix, module in (
        (IDENTITY_FILE, ".gz", gzip),
        (PARTITION_FILE, ".gz", gzip),
        (ATTRIBUTE_FILE, ".xz", lzma),
    ):
        (folder / name).write_bytes(module.decompress((real_data / "celeba" / f"{name}{suffix}").read_bytes()))


def test_real_text_files(real_data, tmp_path):
    unpack(real_data, tmp_path)
    people = read_people(tmp_path, "Smiling")
    assert len(people) == 10_177 and sum(map(len, people.values())) == 202_599
    assert ("000001.jpg", 1) in people["identity_02880"]
    # LEAF's own reading of the same files: its labels are those of these people's images.
    leaf = json.loads((real_data / "celeba" / "leaf" / "test" / "all_data_niid_1_keep_25_test_8.json").read_text())
    for person, data in leaf["user_data"].items():
        ours = dict(people[f"identity_{int(person):05d}"])
        assert all(ours[image] == label for image, label in zip(data["x"], data["y"], strict=True))
    partitions = read_partitions(tmp_path / PARTITION_FILE, people)
    sides = collections.Counter()
    for images in people.values():
        (side,) = {partitions[image] for image, _ in images}
        sides[side] += 1
    assert sides == {"train": 8192, "validation": 985, "test": 1000}


def test_real_leaf_files(real_data, prepare, tmp_path):
    # Some people only: the images are made here, all alike.
    image = write_image(tmp_path / "raw", "any.jpg", halves((200, 100, 0), (0, 0, 250))).read_bytes()
    counts = collections.Counter()
    for side in ("train", "test"):
        name = f"all_data_niid_1_keep_25_{side}_8.json"
        leaf = json.loads((real_data / "celeba" / "leaf" / side / name).read_text())
        chosen = sorted(leaf["users"])[:20]
        for user in chosen:
            counts[side] += len(leaf["user_data"][user]["x"])
            for picture in leaf["user_data"][user]["x"]:
                (tmp_path / "raw" / IMAGE_FOLDER / picture).write_bytes(image)
        leaf["num_samples"] = [leaf["num_samples"][leaf["users"].index(user)] for user in chosen]
        leaf["users"], leaf["user_data"] = chosen, {user: leaf["user_data"][user] for user in chosen}
        (tmp_path / "raw" / side).mkdir()
        (tmp_path / "raw" / side / name).write_text(json.dumps(leaf))
    data = {"kind": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, "validation_fraction": 0.0}
    manifest = prepare(**data, min_examples_per_client=5).manifest
    assert manifest.kept == manifest.read == Tally(20, sum(counts.values()))
    assert manifest.num_examples == {"train": counts["train"], "validation": 0, "test": counts["test"]}
