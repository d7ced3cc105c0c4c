"""Damaged exports in the process that loads them: refused or verified, and nothing outside them is opened."""

import collections
import shutil

import pytest
import tensorflow as tf

from serving.verify.verify import verify_export
from tests.serving.verify.mutants import edited, make_graph_mutant, make_mutant
from tests.serving.verify.opened import watching
from tests.tiers import amount
from tff_pdp.errors import ServingError

MUTANTS = amount(test=6, all=20)


@pytest.fixture
def canary(tmp_path):
    """A file and a folder beside the export, which nobody may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    secret = folder / "secret.txt"
    secret.write_text("<global>\nalice\nbob\nc\n")
    with watching(folder, secret) as opened:
        yield opened
        assert opened() == []


@pytest.mark.parametrize("make", [make_mutant, make_graph_mutant])
def test_damaged_exports_are_refused_or_verified(fresh_process, export_dir, tmp_path, make, canary):
    # Other seeds than those of the checks alone.
    _verify_mutants(fresh_process, export_dir, tmp_path, make, range(10_000, 10_000 + MUTANTS))


@pytest.mark.hurt
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [make_mutant, make_graph_mutant])
def test_many_more_damaged_exports_are_refused_or_verified(fresh_process, export_dir, tmp_path, make, canary):
    _verify_mutants(fresh_process, export_dir, tmp_path, make, range(30_000, 30_400))


def _verify_mutants(process, export_dir, tmp_path, make, seeds):
    outcomes = collections.Counter()
    for seed in seeds:
        mutant = tmp_path / "base" / str(seed)
        done = make(export_dir, mutant, seed)
        try:
            verify_export(mutant, process)
            outcomes["verified"] += 1
        except ServingError as error:
            assert str(mutant) in str(error), done
            outcomes["refused"] += 1
        shutil.rmtree(mutant)
    assert outcomes["refused"] > len(seeds) / 4
    assert outcomes["verified"] > 0
    # However the mutants went, what is right is still found right.
    verify_export(export_dir, process)


@pytest.mark.parametrize("name", ["../../../outside/secret.txt", "{outside}/secret.txt"])
def test_assets_outside_are_not_opened(fresh_process, copy, tmp_path, name, canary):
    with edited(copy) as meta_graph:
        meta_graph.asset_file_def[0].filename = name.format(outside=tmp_path / "outside")
    with pytest.raises(ServingError, match="outside its assets directory"):
        verify_export(copy, fresh_process)


def test_links_to_the_outside_are_not_followed(fresh_process, copy, tmp_path, canary):
    vocabulary = next((copy / "assets").iterdir())
    vocabulary.unlink()
    vocabulary.symlink_to(tmp_path / "outside" / "secret.txt")
    with pytest.raises(ServingError, match="is a link"):
        verify_export(copy, fresh_process)


def test_files_named_in_the_graph_are_not_opened(fresh_process, copy, tmp_path, canary):
    with edited(copy) as meta_graph:
        for function in meta_graph.graph_def.library.function:
            for node in [node for node in function.node_def if node.op == "InitializeTableFromTextFileV2"]:
                node.input[1] = "file_name:output:0"
                name = function.node_def.add(name="file_name", op="Const")
                name.attr["dtype"].type = tf.string.as_datatype_enum
                name.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(str(tmp_path / "outside" / "secret.txt")))
    with pytest.raises(ServingError, match=r"its name comes from 'file_name:output:0' \(Const\)"):
        verify_export(copy, fresh_process)
