"""Pictures of synthetic images: a row for each silo, in a report and as a figure."""

import dataclasses
import html
import re

import numpy as np
import pytest

from tests.reports import report_samples as samples
from tff_pdp.reports import html as report_html
from tff_pdp.reports.content import SyntheticImages
from tff_pdp.reports.plots import synthetic_images


def silo(count, channels=1, size=4):
    """Image i is filled with i / count, and has label count - 1 - i."""
    shades = (np.arange(count) / count).astype(np.float32)
    x = np.broadcast_to(shades[:, None, None, None], (count, size, size, channels))
    return x, np.arange(count)[::-1]


def drawn(axes):
    (image,) = axes.get_images()
    return np.ma.filled(image.get_array().astype(float), np.nan)


def test_images_are_drawn_in_the_order_of_their_labels():
    x, y = silo(3)
    (axes,) = synthetic_images([x], [y], ["north"]).get_axes()
    canvas = drawn(axes)
    # Twelve places of four pixels, with a pixel between; three images, the last has label 0.
    assert canvas.shape == (4, 12 * 5 - 1)
    np.testing.assert_allclose(canvas[0, :14:5], [2 / 3, 1 / 3, 0], rtol=1e-6)
    assert np.isnan(canvas[:, 4]).all() and np.isnan(canvas[:, 14:]).all()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["north"]


def test_of_many_images_those_in_equal_distances_are_drawn():
    x, y = silo(111)
    (axes,) = synthetic_images([x], [y], ["north"]).get_axes()
    assert [int(label.get_text()) for label in axes.get_xticklabels()] == list(range(0, 111, 10))


def test_pixels_are_scaled_by_the_public_range_and_colours_stay_colours():
    x, y = silo(2, channels=3)
    (axes,) = synthetic_images([x * 4 - 2], [y], ["north"], (-2, 2)).get_axes()
    canvas = drawn(axes)
    assert canvas.shape == (4, 59, 4)
    np.testing.assert_allclose(canvas[0, [0, 5]], [[0.5, 0.5, 0.5, 1], [0, 0, 0, 1]])
    assert (canvas[:, 4, 3] == 0).all() and (canvas[:, 9:, 3] == 0).all()


def test_at_most_ten_silos_are_drawn():
    x, y = silo(2)
    assert len(synthetic_images([x] * 12, [y] * 12, [f"silo_{place}" for place in range(12)]).get_axes()) == 10


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [(*silo(2, channels=2), "images of 2 channels cannot be drawn"), (*silo(0), "north has no synthetic images")],
)
def test_what_cannot_be_drawn_is_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        synthetic_images([x], [y], ["north"])


@pytest.mark.parametrize("is_private", [True, False])
def test_the_page_has_the_images_and_says_what_protects_them(is_private):
    images = tuple(SyntheticImages(name, *silo(5)) for name in ("north", "<south>"))
    report = samples.sample_report(12) if is_private else samples.seeded_report(12)
    without = report_html.render_report(report)
    page = report_html.render_report(dataclasses.replace(report, synthetic=images))
    assert page.count("<svg") == without.count("<svg") + 1
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"https?://|src=|url\((?!#)|@import", page)
    assert "Synthetic images of 2 of 2 silos" in page and "&lt;south&gt;" in page and "<south>" not in page
    assert ("their cost is in each silo's ε" in html.unescape(page)) == is_private
    assert page == report_html.render_report(dataclasses.replace(report, synthetic=images))
