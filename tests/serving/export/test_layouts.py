import dataclasses

import numpy as np

from serving.export.model_checks import LayoutSize, estimate
from serving.models import HYPERNETWORK


def test_an_estimate_is_near_the_files(exporter, export_dir):
    on_disk = sum(path.stat().st_size for path in export_dir.rglob("*") if path.is_file())
    assert 0.5 < estimate(exporter.models()).bytes_on_disk / on_disk < 2


def test_an_example_takes_the_row_it_gathers_and_the_weights_that_are_made(exporter):
    heads = {"a": {name: exporter.global_weights[name] for name in exporter.model.head}}
    models = exporter.models(heads)
    # 5 hidden units, 4 classes: 24 values of a head, and 35 of the layer before it.
    assert estimate(models).bytes_per_example == 24 * 4
    made = dataclasses.replace(models, layout=HYPERNETWORK, make_weights=lambda shared, own: {**shared, **own})
    assert estimate(made).bytes_per_example == 24 * 4 + (24 + 35) * 4


def test_memory_grows_with_values_and_ids(exporter):
    heads = {"a": {name: exporter.global_weights[name] for name in exporter.model.head}}
    few = exporter.models(heads)
    many = dataclasses.replace(
        few,
        client_ids=[f"{number:04}" for number in range(1000)],
        rows=np.zeros(1000, np.int32),
        stacked={name: np.repeat(stack[:1], 1001, axis=0) for name, stack in few.stacked.items()},
    )
    grown = estimate(many).bytes_in_memory - estimate(few).bytes_in_memory
    assert 999 * 24 * 4 + 1000 * 5 <= grown <= 999 * 24 * 4 + 1000 * 150


def test_sizes_are_told_in_words():
    text = LayoutSize(52_100_000, 2_500_000_000, 5_160).text()
    assert text.startswith("52.1 MB on disk, 2.5 GB in a server's memory, and 0.00516 MB for each example")
