"""Kinds of raw data whose users are people, for federated learning across devices: who wrote it, who is in the picture.

As `beam_pipelines.sources.builders`, which has the others: each function takes the experiment's `data` section, a
folder that it may write to, and, as keyword-only parameters, what `data.arguments` may hold.
"""

import dataclasses
from pathlib import Path

from beam_pipelines.options import DataConfig, check_features
from beam_pipelines.raw_data import RawData
from beam_pipelines.sources.celeba import CELEBA_CLASSES, CelebaOptions, celeba_images
from beam_pipelines.sources.fed_emnist import (
    FED_EMNIST_CLASSES,
    FED_EMNIST_SHAPE,
    FedEmnistReader,
    decompress_database,
    find_splits,
    list_h5_files,
    read_h5_users,
)
from beam_pipelines.sources.images import shrunken_shape
from beam_pipelines.sources.mnist import (
    MNIST_CLASSES,
    MNIST_TRAIN_FILES,
    find_writers,
    mnist_writers,
    read_labelled_images,
    read_writers,
)
from beam_pipelines.sources.nist import nist_images, num_nist_classes
from beam_pipelines.sources.silo_arrays import write_silo_arrays
from beam_pipelines.sources.silo_files import array_images
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import ConfigError


def build_mnist_writers(data: DataConfig, workspace: Path, *, writers: str | None = None, shrink: int = 1) -> RawData:
    """MNIST's training images by the 539 people who wrote them (Yadav and Bottou, NeurIPS 2019).

    `data.input` is the folder of MNIST's `idx.gz` files. The images of the writers are written to
    `workspace/mnist_writers.npz`, which the job then reads. MNIST's test images were written by others and are not
    used: `data.test_fraction` decides how each writer's images are divided.

    Args:
      data: the experiment's data section.
      workspace: a folder, made if missing.
      writers: QMNIST's `qmnist-train-labels-idx2-int.gz`; default: the file of that name in `data.input`, or in a
        folder `mnist_writers` beside it.
      shrink: side of the squares of pixels of which each becomes one pixel, their mean.

    Raises:
      ConfigError: `shrink`, or the shape or the number of classes, does not fit.
      DataError: a file is missing or damaged, or its rows do not go with the images.
    """
    folder = Path(data.input)
    path = find_writers(folder, writers)
    images = read_labelled_images(folder, *MNIST_TRAIN_FILES, MNIST_CLASSES)
    check_features(data, shrunken_shape(images.x.shape[1:], shrink), MNIST_CLASSES)
    write_silo_arrays(workspace / "mnist_writers.npz", mnist_writers(images, read_writers(path, images), shrink))
    files = [*((folder, name) for name in MNIST_TRAIN_FILES), (path.parent, path.name)]
    parameters = {"shrink": shrink, "origin": [dataclasses.asdict(FileRecord.of(*file)) for file in files]}
    return array_images("mnist_writers", workspace, data, parameters, has_test_examples=False)


def build_fed_emnist(data: DataConfig, workspace: Path) -> RawData:
    """TensorFlow Federated's Federated EMNIST: handwriting by some 3,400 people, 10 or 62 classes.

    `data.input` is `emnist_all.sqlite`, or `emnist_all.sqlite.lzma`, which is decompressed into `workspace` first; or a
    folder with the two `.h5` files of the older form. `data.num_classes` 10 takes the database's digits, 62 all of it.
    Each writer's own test images are the test examples; `data.test_fraction` is not used. Background 1, ink 0.

    Args:
      data: the experiment's data section.
      workspace: a folder, made if missing.

    Raises:
      ConfigError: the shape or the number of classes does not fit.
      DataError: the input is missing or damaged, or has another schema.
    """
    if data.num_classes not in FED_EMNIST_CLASSES:
        raise ConfigError(f"data.num_classes is {data.num_classes}; fed_emnist has 10 (digits) or 62 (all characters)")
    check_features(data, FED_EMNIST_SHAPE, data.num_classes)
    path = Path(data.input)
    if path.is_dir():
        return RawData(
            source="fed_emnist",
            folder=path,
            files=list_h5_files(path),
            read_users=read_h5_users,
            are_images=True,
            has_test_examples=True,
        )
    if path.suffix == ".lzma":
        path = decompress_database(path, workspace)
    splits = find_splits(path, data.num_classes)
    return RawData(
        source="fed_emnist",
        folder=path.parent,
        files=(path.name,),
        read_users=FedEmnistReader(*splits),
        are_images=True,
        has_test_examples=True,
        parameters={"splits": list(splits)},
    )


def build_celeba(
    data: DataConfig, workspace: Path, *, attribute: str = "Smiling", split: str = "random", images: str | None = None
) -> RawData:
    """CelebA by the person in the picture, one attribute as the label (Liu et al., ICCV 2015; Caldas et al., 2018).

    `data.input` is the folder that holds `identity_CelebA.txt`, `list_attr_celeba.txt` and the folder
    `img_align_celeba`; users are `identity_00001`, ... Or it is a folder of LEAF's JSON for CelebA, with the same
    images in it, beside it, or where `images` says. Images are resized to `data.input_shape` by averages over areas.
    One that is missing or damaged becomes a dead letter and counts against `data.max_bad_fraction`. As in LEAF, set
    `data.min_examples_per_client` to 5 to leave out people with fewer images.

    Args:
      data: the experiment's data section: `input_shape` has 3 channels, or 1 for grey; `num_classes` is 2.
      workspace: not used.
      attribute: the label is 1 where an image has it; a name from the second line of `list_attr_celeba.txt`.
      split: `random`, or `by_image_partition` for that of `list_eval_partition.txt`, which divides people, too: clients
        then have training, validation or test images only, and both fractions are not used.
      images: the folder of JPEGs, where it is elsewhere.

    Raises:
      ConfigError: an argument, or the shape or the number of classes, does not fit.
      DataError: a text file or the folder of images is missing, or a text file is damaged.
    """
    options = CelebaOptions(data.input_shape, attribute, split, images)
    check_features(data, data.input_shape, CELEBA_CLASSES)
    return celeba_images(Path(data.input), options)


def build_nist_sd19(data: DataConfig, workspace: Path, *, classes: str = "all") -> RawData:
    """NIST Special Database 19 by the person who wrote it (Grother, 1995; Caldas et al., 2018): raw FEMNIST.

    `data.input` is the folder that holds `by_class` and `by_write`. Users are `f0000_14`, ... Images are scaled to
    `data.input_shape` as in LEAF. Background 1, ink 0. `beam_pipelines.sources.nist` says what becomes a dead letter.

    Args:
      data: the experiment's data section: `input_shape` has 1 channel; `num_classes` goes with `classes`.
      workspace: not used.
      classes: `all` (62), `digits` (10), `letters` (52), or `merged` (47, as in EMNIST's By_Merge).

    Raises:
      ConfigError: there is no such choice, or the shape or the number of classes does not fit.
      DataError: a folder is missing or has no images.
    """
    check_features(data, data.input_shape, num_nist_classes(classes))
    return nist_images(Path(data.input), classes, data.input_shape)
