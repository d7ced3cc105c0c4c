"""Kinds of raw data whose users are people, for federated learning across devices: who wrote it, who is in the picture.

As `tff_pdp.data.datasets`, which has the others: each function takes the experiment's `data` section, a folder that it
may write to, and, as keyword-only parameters, what `data.arguments` may hold.
"""

import dataclasses
from pathlib import Path

from beam_pipelines.raw_data import RawData
from tff_pdp.config import DataConfig
from tff_pdp.data.array_images import array_images, check_features
from tff_pdp.data.celeba import (
    ATTRIBUTE_FILE,
    CELEBA_CLASSES,
    IDENTITY_FILE,
    IMAGE_FOLDER,
    CelebaReader,
    hash_images,
    read_people,
)
from tff_pdp.data.fed_emnist import (
    FED_EMNIST_CLASSES,
    FED_EMNIST_SHAPE,
    FedEmnistReader,
    decompress_database,
    find_splits,
)
from tff_pdp.data.fed_emnist_h5 import list_h5_files, read_h5_users
from tff_pdp.data.images import shrunken_shape
from tff_pdp.data.manifest import FileRecord
from tff_pdp.data.mnist import MNIST_CLASSES, MNIST_TRAIN_FILES, read_labelled_images
from tff_pdp.data.mnist_writers import find_writers, mnist_writers, read_writers
from tff_pdp.data.silo_arrays import write_silo_arrays
from tff_pdp.errors import ConfigError, DataError


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


def build_celeba(data: DataConfig, workspace: Path, *, attribute: str = "Smiling") -> RawData:
    """CelebA by the person in the picture, one attribute as the label (Liu et al., ICCV 2015; Caldas et al., 2018).

    `data.input` is the folder that holds `identity_CelebA.txt`, `list_attr_celeba.txt` and the folder
    `img_align_celeba`. Users are `identity_00001`, ... Images are resized to `data.input_shape` by averages over areas.
    One that is missing or damaged becomes a dead letter and counts against `data.max_bad_fraction`. As in LEAF, set
    `data.min_examples_per_client` to 5 to leave out people with fewer images. The job's runner holds all images in
    memory as float32, several times over: all 202,599 of CelebA want a small `input_shape`.

    Args:
      data: the experiment's data section: `input_shape` has 3 channels, or 1 for grey; `num_classes` is 2.
      workspace: not used.
      attribute: the label is 1 where an image has it; a name from the second line of `list_attr_celeba.txt`.

    Raises:
      ConfigError: there is no such attribute, or the shape or the number of classes does not fit.
      DataError: a text file or the folder of images is missing, or a text file is damaged.
    """
    shape = data.input_shape
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise ConfigError(f"data.input_shape is {list(shape)}; celeba takes [height, width, 3], or 1 for grey")
    check_features(data, shape, CELEBA_CLASSES)
    folder = Path(data.input)
    people = read_people(folder, attribute)
    if not (folder / IMAGE_FOLDER).is_dir():
        raise DataError(f"{folder}: no folder {IMAGE_FOLDER} in it, with CelebA's aligned and cropped images")
    images = sorted(image for ones in people.values() for image, _ in ones)
    return RawData(
        source="celeba",
        folder=folder,
        files=(IDENTITY_FILE, ATTRIBUTE_FILE),
        read_users=CelebaReader(attribute, shape),
        are_images=True,
        # The images are too many to be files of the job, but they decide the content as well.
        parameters={"attribute": attribute, "images_sha256": hash_images(folder, images)},
    )
