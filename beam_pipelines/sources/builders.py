"""Kinds of raw data, as `tff_pdp.experiment.registry.DATASETS` names them: from the settings of an experiment to files
for a job.

Each function takes the experiment's `data` section, a folder that it may write to, and, as keyword-only parameters, the
kind's own options: what `data.arguments` may hold. Those whose users are people are in
`beam_pipelines.sources.user_builders`.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from beam_pipelines.options import DataConfig, check_features
from beam_pipelines.raw_data import RawData
from beam_pipelines.sources.cifar import read_cifar10, read_cifar100
from beam_pipelines.sources.divided import PartitionOptions, RotatedMnistOptions, partitioned_images, rotated_mnist
from beam_pipelines.sources.images import ImageDataset, shrunken_shape
from beam_pipelines.sources.leaf import leaf_images
from beam_pipelines.sources.mnist import read_emnist, read_mnist
from beam_pipelines.sources.silo_arrays import write_silo_arrays
from beam_pipelines.sources.silo_files import SiloFileReader, array_images, list_silo_files
from tff_pdp.errors import ConfigError


def build_leaf(data: DataConfig, workspace: Path) -> RawData:
    """LEAF JSON of images: `data.input` is the folder of `.json` or `.json.gz` files, or of its `train` and `test`.

    Where there are `train` and `test`, they say which examples are test examples, and `data.test_fraction` is not used.
    `workspace` is not used.

    Raises:
      DataError: the folder is missing, or holds no such file or only one of `train` and `test`.
    """
    return leaf_images(Path(data.input))


def build_silo_files(
    data: DataConfig, workspace: Path, *, label_shift: float = 0.0, label_scale: float = 1.0
) -> RawData:
    """Feature vectors of silos, as they are: `data.input` is a `.mat`, `.json`, `.json.gz` or `.npz` file, or a folder.

    `beam_pipelines.sources.silo_files` says what the files hold. With two classes, labels {-1, 1} become {0, 1}.

    Args:
      data: the experiment's data section.
      workspace: not used.
      label_shift: added to every label of a regression, before the scale. A public constant, not taken from the data:
        nothing in the ledger accounts for it.
      label_scale: what the labels of a regression are then multiplied by. A public constant too.

    Raises:
      ConfigError: an argument is out of range, or there are labels to scale but no regression.
      DataError: the input is missing or holds no such file.
    """
    if not (math.isfinite(label_shift) and math.isfinite(label_scale) and label_scale != 0):
        raise ConfigError(
            f"data.arguments: label_shift {label_shift} and label_scale {label_scale} must be finite, the scale not 0"
        )
    if data.num_classes and (label_shift, label_scale) != (0.0, 1.0):
        raise ConfigError(
            "data.arguments: label_shift and label_scale are for regressions; set data.num_classes to 0 for one"
        )
    folder, files = list_silo_files(Path(data.input))
    return RawData(
        source="silo_files",
        folder=folder,
        files=files,
        read_users=SiloFileReader(data.num_classes, label_shift=label_shift, label_scale=label_scale),
        are_images=False,
        parameters={"label_shift": label_shift, "label_scale": label_scale},
    )


def build_rotated_mnist(
    data: DataConfig,
    workspace: Path,
    *,
    num_silos: int = 40,
    num_rotations: int = 4,
    mask_fraction: float = 0.0,
    train_per_silo: int = 1500,
    test_per_silo: int = 250,
    shrink: int = 1,
) -> RawData:
    """Rotated and masked MNIST (Liu, CMU-RI-TR-23-17, 2023, appendix B.1).

    `data.input` is the folder of MNIST's four `idx.gz` files, or of others in their format with ten classes. The images
    of the silos are written to `workspace/rotated_mnist.npz`, which the job then reads. The manifest's parameters say
    under `rotation_groups` to which group each silo belongs, the ground truth of a clustering: group g is rotated by
    90 g degrees. MNIST's own test images are the test examples; `data.test_fraction` is not used.

    Args:
      data: the experiment's data section; `seed` decides who gets which images, rotation and mask.
      workspace: a folder, made if missing.
      num_silos: number of silos.
      num_rotations: number of groups of silos, 1 to 4.
      mask_fraction: probability that a patch of 2 x 2 pixels is white in all images of a silo; 0 for rotations alone.
      train_per_silo: training (and validation) images of a silo.
      test_per_silo: test images of a silo.
      shrink: side of the squares of pixels, masked ones included, of which each becomes one pixel, their mean.

    Raises:
      ConfigError: an argument, or the shape or the number of classes, does not fit.
      DataError: a file is missing or damaged.
    """
    options = RotatedMnistOptions(
        num_silos=num_silos,
        num_rotations=num_rotations,
        mask_fraction=mask_fraction,
        train_per_silo=train_per_silo,
        test_per_silo=test_per_silo,
        shrink=shrink,
    )
    mnist = read_mnist(Path(data.input))
    check_features(data, shrunken_shape(mnist.train.x.shape[1:], shrink), mnist.num_classes)
    groups, silos = rotated_mnist(mnist.train, mnist.test, options, data.seed)
    write_silo_arrays(workspace / "rotated_mnist.npz", silos)
    parameters = {**dataclasses.asdict(options), "rotation_groups": groups, "origin": mnist.origin}
    return array_images("rotated_mnist", workspace, data, parameters, has_test_examples=True)


def build_partitioned_images(
    data: DataConfig,
    workspace: Path,
    *,
    images: str,
    partition: str,
    num_clients: int,
    classes_per_client: int | None = None,
    concentration: float | None = None,
    shrink: int = 1,
) -> RawData:
    """Pooled images divided among artificial clients; `beam_pipelines.sources.divided` has the partitions' sources.

    | images | `data.input` |
    |---|---|
    | `cifar10`, `cifar100` | the python version's archive, its extracted folder, or `tfds` for TensorFlow Datasets |
    | `mnist` | the folder of MNIST's four `idx.gz` files, or of others in that format, such as Fashion-MNIST |
    | `emnist` | the folder of one split's four `idx.gz` files, or the train images of one of several |

    The images of the clients are written to `workspace/partitioned_images.npz`, which the job then reads. The data
    set's own test images are divided like its train images and are the test examples; `data.test_fraction` is not used.

    Args:
      data: the experiment's data section; `seed` decides who gets which images.
      workspace: a folder, made if missing.
      images: which images: `cifar10`, `cifar100` (100 fine classes), `mnist` or `emnist`.
      partition: `classes`: each client has images of a few classes, in uneven shares. `dirichlet`: each has as many
        images, in a mix of classes of its own. `uniform`: each has as many, drawn at random from all.
      num_clients: number of clients.
      classes_per_client: of `classes`: how many classes each client has images of; times `num_clients`, a multiple of
        the number of classes.
      concentration: of `dirichlet`: small values (0.1) give each client few classes, large ones (100) all the same mix.
      shrink: side of the squares of pixels of which each becomes one pixel, their mean.

    Raises:
      ConfigError: an argument, or the shape or the number of classes, does not fit; or TensorFlow Datasets is asked for
        and not installed.
      DataError: the input is missing or damaged.
    """
    options = PartitionOptions(
        partition=partition,
        num_clients=num_clients,
        classes_per_client=classes_per_client,
        concentration=concentration,
        shrink=shrink,
    )
    if images not in _POOLED_IMAGES:
        raise ConfigError(f"data.arguments.images: {images!r} is not known; known: {', '.join(_POOLED_IMAGES)}")
    dataset = _POOLED_IMAGES[images](data.input)
    check_features(data, shrunken_shape(dataset.train.x.shape[1:], shrink), dataset.num_classes)
    write_silo_arrays(workspace / "partitioned_images.npz", partitioned_images(dataset, options, data.seed))
    parameters = {"images": images, **dataclasses.asdict(options), "origin": dataset.origin}
    return array_images("partitioned_images", workspace, data, parameters, has_test_examples=True)


_POOLED_IMAGES: dict[str, Callable[[str], ImageDataset]] = {
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "mnist": lambda source: read_mnist(Path(source)),
    "emnist": lambda source: read_emnist(Path(source)),
}
