"""Whether two runs are about the same records: by digests, by declared sets, and where neither decides."""

import numpy as np
import pytest

from tests.data.written_clients import write_clients
from tests.registry.small_data import FEATURES, records, write_dataset
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import RowInfluence
from tff_pdp.registry import records as records_module
from tff_pdp.registry.matching import declared_sets, match
from tff_pdp.registry.records import (
    RecordKey,
    Records,
    records_of_clients,
    records_of_dataset,
    records_of_examples,
)

KEY = RecordKey(bytes(range(32)))


def digests(folder, clients, **manifest):
    return records_of_dataset(KEY, write_dataset(folder, clients, **manifest), ("train",))


def members(found, own, place):
    """By record of one client, the other run's clients that have it."""
    first, last = own.first[place : place + 2]
    return [sorted(found.members[group]) for group in found.of_records(first, last, place)]


def matched(own, other, own_sets=None, other_sets=None, **options):
    sets = declared_sets(KEY, own, own_sets), declared_sets(KEY, other, other_sets)
    return match(own, other, *sets, **options)


def test_a_single_record_that_both_have_is_found(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 5), "y": records(5, 9)})
    other = digests(tmp_path / "b", {"p": records(100, 110), "q": records(8, 20)})
    found = matched(own, other)
    assert members(found, own, 0) == [[]] * 5
    assert members(found, own, 1) == [[], [], [], [1]]
    assert (found.everyone, found.is_undecided) == ({1}, False)


def test_records_of_two_clients_are_in_both(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 2)})
    other = digests(tmp_path / "b", {"p": records(0, 1), "q": records(0, 2)})
    assert members(matched(own, other), own, 0) == [[0, 1], [1]]


def test_disjoint_records_of_clients_of_one_name_are_not_the_same(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 5)})
    other = digests(tmp_path / "b", {"x": records(5, 9)})
    assert not matched(own, other).everyone
    assert members(matched(own, other, by_name=True), own, 0) == [[0]] * 5
    assert not matched(own, other, "one", "two", by_name=True).everyone, "declared to be others"


def test_minus_zero_and_another_label_make_no_other_record():
    own = records_of_examples(KEY, ["x"], [np.float32([[0.0, 1.0]])])
    other = records_of_examples(KEY, ["x"], [np.float32([[-0.0, 1.0]])])
    np.testing.assert_array_equal(own.digests, other.digests)


def test_the_same_data_set_matches_client_by_client(tmp_path):
    """Records that two clients have in common are still those of each."""
    own = digests(tmp_path / "a", {"x": records(0, 3), "y": records(0, 3)})
    found = matched(own, own)
    assert members(found, own, 0) == [[0]] * 3
    assert members(found, own, 1) == [[1]] * 3


@pytest.mark.parametrize("sets", ["hospitals", {"x": "north", "y": "south"}])
def test_declared_sets_join_what_content_does_not(tmp_path, sets):
    own = digests(tmp_path / "a", {"x": records(0, 3), "y": records(3, 6)})
    other = digests(tmp_path / "b", {"x": records(10, 13), "y": records(13, 16)})
    found = matched(own, other, sets, sets)
    assert members(found, own, 0) == [[0]] * 3
    assert members(found, own, 1) == [[1]] * 3
    assert not found.is_undecided
    assert not matched(own, other, sets, "other").everyone


def test_declared_sets_without_a_common_name_join_all(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 3)})
    other = digests(tmp_path / "b", {"p": records(10, 13), "q": records(13, 16)})
    assert members(matched(own, other, "one", {"p": "one"}), own, 0) == [[0]] * 3
    assert members(matched(own, other, "one", "one"), own, 0) == [[0, 1]] * 3


def test_content_decides_against_declared_sets_that_differ(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 3)})
    other = digests(tmp_path / "b", {"p": records(2, 5)})
    assert members(matched(own, other, "one", "two"), own, 0) == [[], [], [0]]


def test_another_form_of_the_same_raw_files_counts_as_the_same_records(tmp_path):
    small = digests(tmp_path / "a", {"x": records(0, 3)}, parameters={"input_shape": [8]}, sources=["f"])
    large = digests(tmp_path / "b", {"x": records(50, 53)}, parameters={"input_shape": [9]}, sources=["e", "f"])
    found = matched(small, large)
    assert (found.everyone, found.is_undecided) == ({0}, True)
    assert not matched(small, large, "one", "two").everyone
    declared = matched(small, large, "one", "one")
    assert (declared.everyone, declared.is_undecided) == ({0}, False)
    apart = digests(tmp_path / "c", {"x": records(50, 53)}, parameters={"input_shape": [9]}, sources=["e"])
    assert not matched(small, apart).everyone


def test_what_files_of_a_job_were_made_of_counts_as_raw_files_too(tmp_path):
    """Jobs on pooled images read arrays that were written for them, and the manifest names the images besides."""
    origin = [{"name": "train-images-idx3-ubyte.gz", "size": 1, "sha256": "f"}]
    small = digests(tmp_path / "a", {"x": records(0, 3)}, parameters={"shrink": 1, "origin": origin}, sources=["a"])
    large = digests(tmp_path / "b", {"x": records(50, 53)}, parameters={"shrink": 2, "origin": origin}, sources=["b"])
    assert (matched(small, large).everyone, matched(small, large).is_undecided) == ({0}, True)
    many = {"images_sha256": "f"}
    one = digests(tmp_path / "c", {"x": records(0, 3)}, parameters={**many, "input_shape": [8]})
    two = digests(tmp_path / "d", {"x": records(50, 53)}, parameters={**many, "input_shape": [9]})
    assert matched(one, two).is_undecided
    # Another division of the same pixels is told by content.
    divided = {"origin": origin, "partition": "dirichlet", "concentration": 0.1, "num_clients": 1}
    evenly = {"origin": origin, "partition": "uniform", "concentration": None, "num_clients": 2}
    three, four = (
        digests(tmp_path / name, {"x": records(*span)}, parameters=parameters, sources=[name])
        for name, span, parameters in (("e", (0, 3), divided), ("g", (2, 5), evenly))
    )
    assert members(matched(three, four), three, 0) == [[], [], [0]]


def test_masks_that_follow_from_the_seed_make_another_form(tmp_path):
    one, two = (
        digests(
            tmp_path / str(seed),
            {"x": records(10 * seed, 10 * seed + 3)},
            parameters={"source": "rotated_mnist", "seed": seed, "mask_fraction": 0.3, "origin": [{"sha256": "f"}]},
        )
        for seed in (0, 1)
    )
    assert (matched(one, two).everyone, matched(one, two).is_undecided) == ({0}, True)


def test_names_of_made_up_clients_say_nothing_where_content_does_not(tmp_path):
    """Each of the other division's clients may have the record."""
    one, two = (
        digests(
            tmp_path / str(shrink),
            {"silo_000": records(50 * shrink, 50 * shrink + 2), "silo_001": records(50 * shrink + 2, 50 * shrink + 4)},
            parameters={"source": "partitioned_images", "shrink": shrink, "origin": [{"sha256": "f"}]},
        )
        for shrink in (1, 2)
    )
    back = Records.from_bytes(one.to_bytes())
    assert (back.are_named, Records.from_bytes(digests(tmp_path / "x", {"a": records(0, 1)}).to_bytes()).are_named) == (
        False,
        True,
    )
    for by_name in (False, True):
        assert members(matched(back, two, by_name=by_name), one, 0) == [[0, 1]] * 2
    assert (
        members(matched(one, two, {"silo_000": "a", "silo_001": "b"}, {"silo_000": "b", "silo_001": "a"}), one, 0)
        == [[1]] * 2
    )


def test_another_division_of_the_same_raw_files_is_told_by_content(tmp_path):
    """Seeds and shares decide which records there are, not how one looks."""
    one = digests(tmp_path / "a", {"x": records(0, 3)}, parameters={"seed": 0, "num_shards": 1}, sources=["f"])
    two = digests(tmp_path / "b", {"x": records(3, 6)}, parameters={"seed": 1, "num_shards": 2}, sources=["f"])
    assert not matched(one, two).everyone


def test_another_partition_of_the_same_images_is_told_by_content(tmp_path):
    shards = {"partition": "shards", "shards_per_client": 2, "images_per_client": 3, "test_partition": "uniform"}
    unequal = {"partition": "dirichlet_unequal", "concentration": 0.5, "min_images": 1, "training_images": 3}
    one, two = (
        digests(tmp_path / how["partition"], {"silo_000": records(first, first + 3)}, parameters=how, sources=["f"])
        for first, how in ((0, shards), (3, unequal))
    )
    assert not matched(one, two).everyone


def test_rows_of_a_contact_graph_are_known_by_their_names(tmp_path):
    """A person's row changes with the contacts, and is the same person's."""
    promise = RowInfluence("node", "replace_one", 3, "by hand")
    own = digests(tmp_path / "a", {"x": records(0, 3)}, row_influence=promise)
    other = digests(tmp_path / "b", {"x": records(7, 9)}, row_influence=promise)
    assert members(matched(own, other), own, 0) == [[0], [0], []]


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
def test_digests_are_client_by_client_and_split_by_split(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(records_module, "_EXAMPLES_AT_A_TIME", at_a_time)
    key = RecordKey(bytes(32))
    numbers = {("a", "train"): (0, 2), ("a", "test"): (2, 5), ("b", "test"): (5, 6), ("c", "train"): (6, 10)}
    extents = [
        (client, split, 0, records(*own), np.zeros(own[1] - own[0], np.int64))
        for (client, split), own in numbers.items()
    ]
    dataset = ClientDataset.open(write_clients(tmp_path / "clients", FEATURES, extents))
    found = records_of_clients(key, dataset, ["c", "a", "b"], ["train", "test"])
    assert found.first.tolist() == [0, 4, 9, 10]
    expected = [*range(6, 10), *range(5), 5]
    # Each by itself: a digest is that of the record's bytes alone.
    one_by_one = [key.examples(records(number, number + 1))[0] for number in expected]
    assert found.digests.tolist() == one_by_one and found.clients.tolist() == key.clients("cab").tolist()


def test_a_client_without_records_is_matched_by_what_is_declared(tmp_path):
    own = digests(tmp_path / "a", {"x": records(0, 3), "y": np.zeros((0, 3), np.float32)})
    other = digests(tmp_path / "b", {"y": records(10, 13)})
    assert members(matched(own, other), own, 1) == [[]]
    assert members(matched(own, other, "one", "one"), own, 1) == [[0]]


def test_files_of_digests_hold_eight_bytes_a_record_and_no_more():
    own = records_of_examples(KEY, ["x"], [records(0, 1000)])
    content = own.to_bytes()
    assert len(content) < 8 * 1000 + 2000
    back = Records.from_bytes(content)
    np.testing.assert_array_equal(back.digests, own.digests)
    np.testing.assert_array_equal(back.first, own.first)


def test_without_the_key_digests_tell_nothing():
    other = RecordKey(bytes(32))
    assert not set(KEY.examples(records(0, 50)).tolist()) & set(other.examples(records(0, 50)).tolist())
    assert KEY.fingerprint() != other.fingerprint()
    assert len(set(KEY.clients(["a", "b"]).tolist()) & set(other.clients(["a", "b"]).tolist())) == 0
