"""Quality of synthetic data: rows, parts of a run, and models that learn what there is to learn."""

import gzip
import json
import struct
import sys

import numpy as np
import pytest

from benchmarks.synthetic import quality
from benchmarks.synthetic.quality import Column, Examples, chosen, measure, merged, table


def images(number, seed):
    """Bright squares, in one of ten places for each class, on dark noise."""
    generator = np.random.default_rng(seed)
    y = generator.integers(10, size=number)
    x = generator.uniform(0, 0.2, size=(number, 14, 14, 1))
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 4)
        image[4 * row + 1 : 4 * row + 4, 3 * column + 1 : 3 * column + 4] = 0.9
    return Examples(x, y)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(quality, "SYNTHETIC_IMAGES", 500)
    monkeypatch.setattr(quality, "EPOCHS", 5)


def test_models_learn_from_synthetic_images_of_classes_that_are_far_apart(small):
    train, test = images(3000, 0), images(300, 1)
    row = measure("dp_gaussian", "mnist", Column(2500, 10), 0, train, test)
    assert row["cnn"] > 0.9 and row["softmax"] > 0.7
    assert (row["records"], row["epsilon"], row["delta"], row["seed"]) == (2500, 10, 1e-5, 0)
    assert row["noise_multiplier"] == pytest.approx(0.5, abs=0.01) and min(row["fit_s"], row["fit_cpu_s"]) > 0


def test_a_refusal_is_a_row(small):
    row = measure("dp_gaussian", "mnist", Column(20, 0.1), 0, images(20, 0), images(10, 1))
    assert "too few records" in row["refused"] and "cnn" not in row


def test_records_are_drawn_without_replacement():
    train = Examples(np.arange(50.0), np.arange(50))
    first = chosen(train, 20, 3)
    assert len(set(first.y.tolist())) == 20 and (first.x == first.y).all()
    assert (chosen(train, 20, 3).y == first.y).all() and not (chosen(train, 20, 4).y == first.y).all()


def row_of(seed, **changes):
    row = {"dataset": "mnist", "generator": "dp_gaussian", "records": 6000, "epsilon": 10.0, "seed": seed}
    return {**row, "cnn": 0.8, "softmax": 0.7, "fit_cpu_s": 1.0, **changes}


def test_a_part_of_a_run_replaces_its_own_rows_only():
    rows = [row_of(0), row_of(1)]
    found = merged(rows, [row_of(1, cnn=0.9), row_of(1, epsilon=1.0)])
    assert found == [row_of(0), row_of(1, cnn=0.9), row_of(1, epsilon=1.0)]


def test_the_table_has_means_over_seeds_times_and_the_reference():
    rows = [row_of(0), row_of(1, cnn=0.9, fit_cpu_s=2.5), row_of(0, records=2000, epsilon=2.0, refused="why")]
    real = row_of(0, generator="real", records=10_000, epsilon=None, cnn=0.975, softmax=0.9)
    lines = table([*rows, real]).splitlines()
    assert lines[3] == "| dp_gaussian |  |  | 85.0 / 70.0 |  | refused | 1.0 to 2.5 |"
    assert lines[0] == "mnist:" and "10,000 real images: 97.5 / 90.0" in lines


def test_the_command_runs_a_part_and_keeps_the_others(small, tmp_path, monkeypatch):
    for side, number in (("train", 600), ("t10k", 20)):
        drawn = images(number, number)
        pixels = np.rint(drawn.x[..., 0] * 255).astype(np.uint8).repeat(2, axis=1).repeat(2, axis=2)
        content = struct.pack(">4B3I", 0, 0, 8, 3, number, 28, 28) + pixels.tobytes()
        (tmp_path / f"{side}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        labels = struct.pack(">4BI", 0, 0, 8, 1, number) + drawn.y.astype(np.uint8).tobytes()
        (tmp_path / f"{side}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    output = tmp_path / "found.json"
    output.write_text(json.dumps({"machine": "", "rows": [row_of(7)]}))
    options = ["--data", str(tmp_path), "--output", str(output), "--generators", "dp_gaussian", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["quality", *options, "--columns", "600:10"])
    quality.main()
    found = json.loads(output.read_text())
    assert found["rows"][0] == row_of(7) and found["machine"]
    assert found["rows"][1]["records"] == 600 and len(found["rows"]) == 2
