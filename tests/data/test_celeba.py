"""CelebA by person: both text files, images drawn here, and what is missing or damaged."""

import gzip
import json
import lzma

import numpy as np
import pytest
from PIL import Image

from beam_pipelines.schema import Reason
from tff_pdp.data.celeba import ATTRIBUTE_FILE, IDENTITY_FILE, IMAGE_FOLDER, CelebaReader, hash_images, read_people
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
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path, format="JPEG", quality=95)
    return path


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


def test_images_become_averages(tmp_path):
    write_text(tmp_path)
    for image in PEOPLE:
        write_image(tmp_path, image, halves((200, 100, 0), (0, 0, 250)))
    _, second = CelebaReader("Smiling", (1, 2, 3))(tmp_path / IDENTITY_FILE)
    assert (second.client, second.y, second.num_samples) == ("identity_02880", [0, 1], 2)
    # JPEG keeps colours up to a few levels of 255.
    for x in second.x:
        assert x.dtype == np.float32 and x.min() >= 0 and x.max() <= 1
        np.testing.assert_allclose(x * 255, [200, 100, 0, 0, 0, 250], atol=6)
    stripes = np.where(np.arange(178) % 8 < 4, 0, 240).astype(np.uint8)
    write_image(tmp_path, "000002.jpg", np.broadcast_to(stripes[:, np.newaxis], (218, 178, 3)))
    first, _ = CelebaReader("Smiling", (2, 1, 1))(tmp_path / IDENTITY_FILE)
    # 22 whole stripes and one half, which is black.
    np.testing.assert_allclose(first.x[0] * 255, [240 * 88 / 178] * 2, atol=3)
    assert not list(CelebaReader("Smiling", (1, 2, 3))(tmp_path / ATTRIBUTE_FILE))


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
    data = {"source": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, "max_bad_fraction": 0.2}
    dataset = prepare(**data)
    assert sum(dataset.manifest.clients["identity_00003"].values()) == 16
    assert dataset.manifest.dropped[Reason.PIXELS_NOT_NUMBERS].examples == 4
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


def test_images_are_part_of_what_decides_the_dataset(tmp_path):
    write_text(tmp_path)
    images = sorted(PEOPLE)
    for image in images:
        write_image(tmp_path, image, halves((1, 1, 1), (9, 9, 9)))
    first = hash_images(tmp_path, images)
    assert hash_images(tmp_path, images) == first
    write_image(tmp_path, images[1], halves((1, 1, 1), (90, 9, 9)))
    second = hash_images(tmp_path, images)
    (tmp_path / IMAGE_FOLDER / images[1]).unlink()
    assert len({first, second, hash_images(tmp_path, images)}) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"arguments": {"attribute": "Grinning"}}, "no attribute 'Grinning'; known: 5_o_Clock_Shadow, Smiling, Young"),
        ({"input_shape": [64]}, r"celeba takes \[height, width, 3\], or 1 for grey"),
        ({"input_shape": [8, 8, 4]}, r"celeba takes \[height, width, 3\], or 1 for grey"),
        ({"num_classes": 62}, r"and 62; celeba has \[8, 8, 3\] and 2"),
    ],
)
def test_settings_that_do_not_fit(prepare, tmp_path, data, message):
    write_text(tmp_path / "raw")
    with pytest.raises(ConfigError, match=message):
        prepare(**{"source": "celeba", "input_shape": [8, 8, 3], "num_classes": 2, **data})


@pytest.mark.parametrize(
    ("people", "smiling", "count", "message"),
    [
        (PEOPLE, SMILING, 5, r"list_attr_celeba\.txt: 4 images, where its first line says 5"),
        (PEOPLE, SMILING, "", r"list_attr_celeba\.txt: lines 1 and 2 must be"),
        (
            PEOPLE,
            {**SMILING, "000002.jpg": 0},
            None,
            r"list_attr_celeba\.txt: line 4: needs the name of an image",
        ),
        (PEOPLE, {"../../a.jpg": 1}, None, r"list_attr_celeba\.txt: line 3: needs the name of an image"),
        ({**PEOPLE, "000002.jpg": "7 8"}, SMILING, None, r"identity_CelebA\.txt: line 2: needs the name of an image"),
        ({**PEOPLE, "000005.jpg": 1}, SMILING, None, r"identity_CelebA\.txt: line 5: 000005\.jpg is not in list_attr"),
        ({"000001.jpg": 1}, SMILING, None, r"identity_CelebA\.txt: 000002\.jpg of list_attr_celeba\.txt is not in it"),
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
    data = {"source": "celeba", "input_shape": [8, 8, 3], "num_classes": 2}
    folder = write_text(tmp_path / "raw")
    with pytest.raises(DataError, match="raw: no folder img_align_celeba in it"):
        prepare(**data)
    (folder / IDENTITY_FILE).unlink()
    with pytest.raises(DataError, match=r"identity_CelebA\.txt: no such file; data\.input takes CelebA's folder"):
        prepare(**data)


def test_real_text_files(real_data, tmp_path):
    (tmp_path / IDENTITY_FILE).write_bytes(gzip.decompress((real_data / "celeba" / f"{IDENTITY_FILE}.gz").read_bytes()))
    (tmp_path / ATTRIBUTE_FILE).write_bytes(
        lzma.decompress((real_data / "celeba" / f"{ATTRIBUTE_FILE}.xz").read_bytes())
    )
    people = read_people(tmp_path, "Smiling")
    assert len(people) == 10_177 and sum(map(len, people.values())) == 202_599
    assert ("000001.jpg", 1) in people["identity_02880"]
    # LEAF's own reading of the same files: its labels are those of these people's images.
    leaf = json.loads((real_data / "celeba" / "leaf" / "test" / "all_data_niid_1_keep_25_test_8.json").read_text())
    for person, data in leaf["user_data"].items():
        ours = dict(people[f"identity_{int(person):05d}"])
        assert all(ours[image] == label for image, label in zip(data["x"], data["y"], strict=True))
