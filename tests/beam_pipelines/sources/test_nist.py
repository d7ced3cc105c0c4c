"""NIST SD19's images by writer, joined with their classes: images drawn here, in both folders."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import ClientDatasetOptions
from beam_pipelines.sources import nist
from beam_pipelines.sources.nist import NistSd19, class_numbers
from tests.beam_pipelines.conftest import contents, dead_letters
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import RecordCounts, Tally
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import read_settings

WRITERS = ("f0000_14", "f0001_41", "f0002_03")
CLASSES = ("30", "39", "41", "61", "6d")


@pytest.fixture
def folder(tmp_path):
    """Two images of each class by each of three writers, under other names in both folders."""
    for place, writer in enumerate(WRITERS):
        for number, name in enumerate(CLASSES * 2):
            content = draw(seed=100 * place + number)
            save(tmp_path / "raw" / "by_class" / name / f"hsf_{place}" / f"hsf_{place}_{number:05d}.png", content)
            save(writer_file(tmp_path, writer, number), content)
    # A copy of one, as the folders train_<class> have it, is not read.
    save(tmp_path / "raw" / "by_class" / "30" / "train_30" / "train_30_00000.png", draw(seed=1))
    return tmp_path / "raw"


def writer_file(tmp_path, writer, number):
    part = WRITERS.index(writer) % 2
    kind = "dlu"[number % 3]
    return tmp_path / "raw" / "by_write" / f"hsf_{part}" / writer / f"{kind}{writer[1:]}" / f"{number:05d}.png"


def draw(seed):
    """A white square with a random dark block, 128 x 128."""
    generator = np.random.default_rng(seed)
    pixels = np.full((128, 128), 255, np.uint8)
    top, left = generator.integers(20, 60, 2)
    pixels[top : top + 40, left : left + 20] = generator.integers(0, 100, (40, 20))
    return pixels


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        Image.fromarray(content).convert("RGB").save(path, format="PNG")


def nist_images(folder, classes="all", shape=(28, 28, 1)):
    num_classes = {"all": 62, "digits": 10, "letters": 52}.get(classes, 47)
    settings = {"input": str(folder), "classes": classes, "input_shape": shape, "num_classes": num_classes}
    return NistSd19(kind="nist_sd19", **settings).build(folder)


def run(folder, output, classes="all", **changes):
    options = {"input_shape": (28, 28, 1), "num_classes": 62, "min_examples_per_client": 1, "num_shards": 3}
    job = ClientDatasetOptions(input=folder, output=output, **{"max_bad_fraction": 1.0, **options, **changes})
    return run_client_dataset_job(nist_images(folder, classes, job.input_shape), job)


def test_every_image_comes_back(folder, tmp_path):
    manifest = run(folder, tmp_path / "clients").manifest
    assert manifest.read == manifest.kept == Tally(3, 30)
    assert manifest.rows == {"class_images": RecordCounts(30, 30, {})}
    dataset = ClientDataset.open(tmp_path / "clients", verify=True)
    assert dataset.client_ids == WRITERS
    parts = [dataset.load(WRITERS[1], split) for split in ("train", "validation", "test")]
    found = {(x.tobytes(), int(y)) for part in parts for x, y in zip(part.x, part.y, strict=True)}
    expected = set()
    for number, label in enumerate([0, 9, 10, 36, 48] * 2):
        # As LEAF does it, with Pillow as it was then: without the short cut of reducing by whole numbers first.
        image = Image.open(writer_file(tmp_path, WRITERS[1], number)).convert("L")
        image.thumbnail((28, 28), Image.Resampling.LANCZOS, reducing_gap=None)
        expected.add(((np.asarray(image).flatten() / 255).astype(np.float32).tobytes(), label))
    assert found == expected and len(expected) == 10


@pytest.fixture
def damaged(folder, tmp_path):
    """The same with eight images of writers that cannot be used: reason, writer and quoted text of each, sorted."""
    by_class = folder / "by_class" / "30" / "hsf_0"
    save(folder / "by_class" / "4f" / "hsf_0" / "two_classes.png", draw(seed=3))
    save(folder / "by_write" / "hsf_1" / WRITERS[1] / "c0001_41" / "two_writers.png", draw(seed=8))
    save(writer_file(tmp_path, WRITERS[0], 90), draw(seed=9999))
    contents_of = {91: writer_file(tmp_path, WRITERS[0], 3).read_bytes()[:300], 92: b"<html>", 93: b""}
    for number, content in {**contents_of, 94: draw(seed=9999)[:64]}.items():
        save(by_class / f"x{number}.png", content)
        save(writer_file(tmp_path, WRITERS[0], number), content)
    return [
        ("image_in_several_classes", WRITERS[0], "d0000_14/00003.png: in classes 4f, 61"),
        ("image_missing_or_damaged", WRITERS[0], "l0000_14/00091.png: damaged: "),
        ("image_missing_or_damaged", WRITERS[0], "u0000_14/00092.png: not a PNG image"),
        ("image_missing_or_damaged", WRITERS[0], "d0000_14/00093.png: not a PNG image"),
        ("image_missing_or_damaged", WRITERS[0], "l0000_14/00094.png: 128 x 64 pixels, not a square"),
        ("image_of_several_users", WRITERS[0], "u0000_14/00008.png: by f0000_14, f0001_41"),
        ("image_of_several_users", WRITERS[1], "two_writers.png: by f0000_14, f0001_41"),
        ("image_without_class", WRITERS[0], "d0000_14/00090.png: no image in by_class has this content"),
    ]


def test_what_cannot_be_used_becomes_a_dead_letter(folder, damaged, tmp_path):
    manifest = run(folder, tmp_path / "clients").manifest
    assert len(list((folder / "by_write").rglob("*.png"))) == 36
    assert manifest.read == Tally(3, 36) and manifest.kept == Tally(3, 28)
    expected = Counter(reason for reason, *_ in damaged)
    assert manifest.dropped == {reason: Tally(0, number) for reason, number in expected.items()}
    assert manifest.rows == {"class_images": RecordCounts(35, 35, {})}
    letters = dead_letters(tmp_path / "clients" / "dead_letters")
    for reason, writer, text in damaged:
        (letter,) = (letter for letter in letters if text in letter["raw"])
        assert (letter["reason"], letter["client"], letter["source"]) == (reason, writer, "by_write")
    assert len(letters) == len(damaged) and not any(str(tmp_path) in str(letter) for letter in letters)
    with pytest.raises(DataError, match=r"22\.2% of 36 examples cannot be used.*image_without_class: 0 users, 1 ex"):
        run(folder, tmp_path / "strict", max_bad_fraction=0.2)


def test_copies_with_one_writer_and_class_are_kept(folder, tmp_path):
    save(tmp_path / "raw" / "by_class" / "61" / "hsf_0" / "copy.png", draw(seed=3))
    save(writer_file(tmp_path, WRITERS[0], 99), draw(seed=3))
    manifest = run(folder, tmp_path / "clients").manifest
    assert manifest.kept == Tally(3, 31) and manifest.rows == {"class_images": RecordCounts(31, 31, {})}


def test_images_in_by_class_that_no_writer_has_are_counted(folder, tmp_path):
    for number in range(10):
        writer_file(tmp_path, WRITERS[2], number).unlink()
    manifest = run(folder, tmp_path / "clients", max_bad_fraction=0.0).manifest
    assert manifest.kept == Tally(2, 20)
    assert manifest.rows == {"class_images": RecordCounts(30, 20, {"image_without_user": 10})}


@pytest.mark.parametrize(
    ("classes", "num_classes", "labels"),
    [
        ("digits", 10, {0, 9}),
        ("letters", 52, {0, 26, 38}),
        # m counts as M.
        ("merged", 47, {0, 9, 10, 36, 22}),
    ],
)
def test_choices_of_classes(folder, tmp_path, classes, num_classes, labels):
    manifest = run(folder, tmp_path / "clients", classes, num_classes=num_classes, max_bad_fraction=0.0).manifest
    dataset = ClientDataset.open(tmp_path / "clients")
    splits = ("train", "validation", "test")
    assert {int(y) for split in splits for writer in WRITERS for y in dataset.load(writer, split).y} == labels
    left_out = 30 - 6 * len(labels)
    assert manifest.read == Tally(3, 30) and manifest.kept == Tally(3, 30 - left_out)
    assert manifest.dropped == ({"class_not_chosen": Tally(0, left_out)} if left_out else {})
    assert manifest.parameters["classes"] == classes


def test_names_of_classes():
    assert [len(set(class_numbers(one).values())) for one in ("all", "digits", "letters", "merged")] == [62, 10, 52, 47]
    # As LEAF's relabel_class has them.
    for name, number in class_numbers("all").items():
        leaf = (
            int(name) - 30 if name.isdigit() and int(name) < 40 else int(name, 16) - (55 if int(name, 16) <= 90 else 61)
        )
        assert number == leaf
    merged = class_numbers("merged")
    # EMNIST's mapping of By_Merge: 36 to 46 are a, b, d, e, f, g, h, n, q, r, t.
    assert [merged[f"{ord(letter):x}"] for letter in "abdefghnqrt"] == list(range(36, 47))
    assert all(merged[f"{ord(letter):x}"] == merged[f"{ord(letter.upper()):x}"] for letter in "cijklmopsuvwxyz")


@pytest.mark.parametrize("exchange", ["files", "runner"])
def test_same_bytes_however_it_is_run(folder, damaged, tmp_path, exchange, monkeypatch):
    assert damaged
    run(folder, tmp_path / "clients")
    monkeypatch.setattr(nist, "_IMAGES_PER_TASK", 3)
    run(folder, tmp_path / "again", exchange=exchange)
    assert contents(tmp_path / "clients") == contents(tmp_path / "again")


def test_content_of_images_is_part_of_what_decides_the_dataset(folder, tmp_path):
    run(folder, tmp_path / "clients")
    assert run(folder, tmp_path / "clients").skipped
    save(writer_file(tmp_path, WRITERS[0], 0), draw(seed=5))
    with pytest.raises(DataError, match="prepared from other input"):
        run(folder, tmp_path / "clients")


def test_folders_that_do_not_fit(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"classes must be one of all, digits, letters, merged, not 'upper'"):
        read_settings(NistSd19, {"kind": "nist_sd19", "input": str(folder), "classes": "upper"}, "a test")
    with pytest.raises(ConfigError, match=r"input_shape is \[28, 28, 3\]"):
        nist_images(folder, "all", (28, 28, 3))
    (folder / "by_class" / "2a").mkdir()
    with pytest.raises(DataError, match=r"by_class/2a: not a folder of a class; NIST SD19"):
        nist_images(folder)
    (folder / "by_class" / "2a").rmdir()
    for writer in WRITERS:
        for number in range(10):
            writer_file(tmp_path, writer, number).unlink()
    with pytest.raises(DataError, match=r"by_write: no \.png file"):
        nist_images(folder)
    with pytest.raises(DataError, match=r"by_class: no such folder; the input must be the folder of NIST"):
        nist_images(folder / "by_class")
