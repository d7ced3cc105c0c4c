"""The command line of the image jobs: one set of common arguments, and every job from files to a client dataset."""

import argparse
import dataclasses
import json
import sqlite3
import typing

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from PIL import Image

from beam_pipelines.__main__ import JOBS as TABLE
from beam_pipelines.__main__ import main
from beam_pipelines.options import ClientDatasetOptions
from beam_pipelines.sources.celeba import Celeba
from beam_pipelines.sources.fed_emnist import FedEmnist
from beam_pipelines.sources.leaf import Leaf
from beam_pipelines.sources.nist import NistSd19
from tests.beam_pipelines.conftest import contents, make_leaf, make_user
from tests.unrun import parse
from tff_pdp.data.manifest import Manifest, Tally
from tff_pdp.errors import ConfigError

JOBS = ("femnist", "nist", "celeba", "fed-emnist")


def read(job, *words):
    return parse(TABLE, [job, "--input", "a", "--output", "b", *words])


@pytest.mark.parametrize(
    ("job", "kind"), [("femnist", Leaf), ("nist", NistSd19), ("celeba", Celeba), ("fed-emnist", FedEmnist)]
)
def test_defaults_are_those_of_the_options(job, kind):
    command = read(job)
    assert isinstance(command.source, kind)
    known = {field.name: field.default for field in dataclasses.fields(ClientDatasetOptions)}
    for name, default in known.items():
        if default is not dataclasses.MISSING:
            assert getattr(command.job, name) == default, name
    for name in typing.get_type_hints(kind):
        if name not in ("kind", "input", "num_shards", "num_classes"):
            assert getattr(command.source, name) == getattr(kind(kind="any", input="a"), name), name


def test_source_and_job_are_told_the_same():
    command = read("femnist", "--seed", "3", "--num_shards", "5", "--input_shape", "2", "2", "1", "--num_classes", "4")
    for name in ("seed", "num_shards", "input_shape", "num_classes"):
        assert getattr(command.source, name) == getattr(command.job, name)
    assert (command.job.seed, command.job.num_shards, command.job.input_shape) == (3, 5, (2, 2, 1))


def test_flags_that_are_none_of_ours_go_to_beam():
    flags = ("--direct_num_workers=2", "--direct_running_mode", "multi_processing")
    assert read("femnist", *flags).job.pipeline_args == flags
    # All that Beam itself knows, and none of which looks like a slip.
    parser = argparse.ArgumentParser()
    for kind in PipelineOptions.__subclasses__():
        kind._add_argparse_args(parser)
    known = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
    assert len(known) > 100
    for job in (*JOBS, "contact-graph"):
        ours = {"--help", "--input", "--output", "--runner", "--seed"}
        words = [f"{word}=1" for word in known if word not in ours]
        bound = ["--degree_bound", "edge"] if job == "contact-graph" else []
        assert set(words) >= set(read(job, *bound, *words).job.pipeline_args)


def test_slips_do_not_go_to_beam():
    with pytest.raises(ConfigError, match="unknown option --num_clases; did you mean --num_classes"):
        read("femnist", "--num_clases", "3")


@pytest.mark.parametrize("job", JOBS)
def test_help(job, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([job, "--help"])
    shown = capsys.readouterr().out
    assert f"python -m beam_pipelines {job} --input" in shown and "--direct_num_workers" in shown


def save(path, grey):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((128, 128), grey, np.uint8)).save(path)


def run(tmp_path, job, *arguments, source="raw"):
    """The manifest of what a job made, or its exit status; both ways to run it give the same bytes."""
    common = [job, "--input", str(tmp_path / source), "--min_examples_per_client", "2", "--num_shards", "2"]
    status = main([*common, "--output", str(tmp_path / "clients"), *arguments])
    if status:
        return status
    assert main([*common, "--output", str(tmp_path / "again"), "--exchange", "runner", *arguments]) == 0
    assert contents(tmp_path / "clients") == contents(tmp_path / "again")
    return Manifest.load(tmp_path / "clients")


def test_femnist(write_leaf, tmp_path, capsys):
    write_leaf(make_leaf({"a": make_user(0)}))
    assert run(tmp_path, "femnist") == 2
    assert "wrong_pixel_count: 0 users, 12 examples" in capsys.readouterr().err
    manifest = run(tmp_path, "femnist", "--input_shape", "2", "2", "1", "--direct_num_workers=1")
    assert manifest.read == manifest.kept == Tally(1, 12)
    assert str(tmp_path / "clients") in capsys.readouterr().out


def test_nist(tmp_path, capsys):
    for number in range(4):
        for place in (f"by_class/{('30', '41')[number % 2]}/hsf_0", "by_write/hsf_0/f0000_14/d0000_14"):
            save(tmp_path / "raw" / place / f"{number}.png", number)
    flags = ("--classes", "digits", "--input_shape", "14", "14", "1", "--test_fraction", "0")
    manifest = run(tmp_path, "nist", *flags, "--validation_fraction", "0")
    assert (manifest.features.shape, manifest.features.num_classes) == ((14, 14, 1), 10)
    assert manifest.read == Tally(1, 4) and manifest.kept == Tally(1, 2)
    assert manifest.parameters["source"] == "nist_sd19"
    assert run(tmp_path, "nist", "--input_shape", "14", "14", "3", "--overwrite") == 2
    assert "beam_pipelines nist: " in capsys.readouterr().err


def test_celeba(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "identity_CelebA.txt").write_text("1.jpg 7\r\n2.jpg 12\r\n3.jpg 7\r\n4.jpg 12\r\n")
    attributes = "4\nSmiling Young\n1.jpg -1  1\n2.jpg  1  1\n3.jpg -1 -1\n4.jpg  1 -1\n"
    (tmp_path / "raw" / "list_attr_celeba.txt").write_text(attributes)
    for number in range(1, 5):
        save(tmp_path / "jpegs" / f"{number}.jpg", number)
    flags = ("--attribute", "Young", "--images", str(tmp_path / "jpegs"), "--input_shape", "8", "8", "3")
    manifest = run(tmp_path, "celeba", *flags, "--test_fraction", "0", "--validation_fraction", "0")
    assert manifest.read == manifest.kept == Tally(2, 4)
    assert {"attribute": "Young", "split": "random"}.items() <= manifest.parameters.items()
    (tmp_path / "jpegs" / "1.jpg").unlink()
    manifest = run(tmp_path, "celeba", *flags, "--overwrite", "--max_bad_fraction", "0.25", "--test_fraction", "0")
    assert manifest.read == Tally(2, 4) and manifest.kept == Tally(1, 2)
    assert manifest.dropped == {
        "image_missing_or_damaged": Tally(0, 1),
        "client_below_min_examples": Tally(1, 1),
    }


def test_fed_emnist(tmp_path):
    import tensorflow as tf

    with sqlite3.connect(tmp_path / "raw.sqlite") as database:
        database.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        database.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for split in ("train", "test"):
            database.execute("INSERT INTO client_metadata VALUES ('f0000_14', ?, 3)", (split,))
            for label in range(3):
                example = tf.train.Example()
                example.features.feature["pixels"].float_list.value.extend(np.linspace(0, 1, 784))
                example.features.feature["label"].int64_list.value.append(label)
                database.execute("INSERT INTO examples VALUES (?, 'f0000_14', ?)", (split, example.SerializeToString()))
    manifest = run(tmp_path, "fed-emnist", "--num_classes", "10", "--validation_fraction", "0", source="raw.sqlite")
    assert manifest.clients == {"f0000_14": {"train": 3, "validation": 0, "test": 3}}
    assert manifest.features.num_classes == 10 and json.dumps(manifest.parameters["splits"]) == '["train", "test"]'
    assert not (tmp_path / ".clients.raw").exists()
