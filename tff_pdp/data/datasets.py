"""Kinds of raw data, as `tff_pdp.registry.DATASETS` names them: from the settings of an experiment to files for a job.

Each function takes the experiment's `data` section, a folder that it may write to, and, as keyword-only parameters, the
kind's own options: what `data.arguments` may hold.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beam_pipelines.leaf import leaf_images
from beam_pipelines.raw_data import RawData
from beam_pipelines.silo_files import SiloFileReader, list_silo_files
from tff_pdp.config import DataConfig
from tff_pdp.data.cifar10 import CIFAR10_CLASSES, CIFAR10_SHAPE, read_cifar10
from tff_pdp.data.heterogeneous_cifar10 import heterogeneous_cifar10
from tff_pdp.data.mnist import MNIST_CLASSES, read_mnist
from tff_pdp.data.rotated_mnist import RotatedMnistOptions, rotated_mnist
from tff_pdp.data.silo_arrays import write_silo_arrays
from tff_pdp.errors import ConfigError

_BRIGHTEST = 255


def build_leaf(data: DataConfig, workspace: Path) -> RawData:
    """LEAF JSON of images: `data.input` is the folder of `.json` or `.json.gz` files; `workspace` is not used.

    Raises:
      DataError: the folder is missing or holds no such file.
    """
    return leaf_images(Path(data.input))


def build_silo_files(
    data: DataConfig, workspace: Path, *, label_shift: float = 0.0, label_scale: float = 1.0
) -> RawData:
    """Feature vectors of silos, as they are: `data.input` is a `.mat`, `.json`, `.json.gz` or `.npz` file, or a folder.

    `beam_pipelines.silo_files` says what the files hold. With two classes, labels {-1, 1} become {0, 1}.

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
    height, width = mnist.train.x.shape[1:3]
    _check_features(data, (height // shrink, width // shrink, 1), MNIST_CLASSES)
    groups, silos = rotated_mnist(mnist.train, mnist.test, options, data.seed)
    write_silo_arrays(workspace / "rotated_mnist.npz", silos)
    parameters = {"rotation_groups": groups, "origin": mnist.origin}
    return _silo_images("rotated_mnist", workspace, data, {**dataclasses.asdict(options), **parameters})


def build_heterogeneous_cifar10(
    data: DataConfig, workspace: Path, *, num_silos: int = 30, classes_per_silo: int = 5
) -> RawData:
    """CIFAR-10 divided among silos with a few classes each (Liu, CMU-RI-TR-23-17, 2023, appendix B.1).

    `data.input` is the official `cifar-10-python.tar.gz`, its extracted folder, or `tfds` for TensorFlow Datasets. The
    images of the silos are written to `workspace/heterogeneous_cifar10.npz`, which the job then reads. CIFAR-10's own
    test images are the test examples; `data.test_fraction` is not used.

    Args:
      data: the experiment's data section; `seed` decides who gets which classes and images.
      workspace: a folder, made if missing.
      num_silos: number of silos.
      classes_per_silo: how many classes each silo has images of.

    Raises:
      ConfigError: an argument, or the shape or the number of classes, does not fit; or TensorFlow Datasets is asked for
        and not installed.
      DataError: the input is missing or damaged.
    """
    _check_features(data, CIFAR10_SHAPE, CIFAR10_CLASSES)
    if num_silos < 1 or not 1 <= classes_per_silo <= CIFAR10_CLASSES or num_silos * classes_per_silo % CIFAR10_CLASSES:
        raise ConfigError(
            f"data.arguments: {num_silos} silos with {classes_per_silo} of {CIFAR10_CLASSES} classes: "
            f"num_silos * classes_per_silo must be a multiple of {CIFAR10_CLASSES}, so that every class is as frequent"
        )
    cifar10 = read_cifar10(data.input)
    silos = heterogeneous_cifar10(cifar10.train, cifar10.test, num_silos, classes_per_silo, data.seed)
    write_silo_arrays(workspace / "heterogeneous_cifar10.npz", silos)
    parameters = {"num_silos": num_silos, "classes_per_silo": classes_per_silo, "origin": cifar10.origin}
    return _silo_images("heterogeneous_cifar10", workspace, data, parameters)


def _silo_images(source: str, workspace: Path, data: DataConfig, parameters: Mapping[str, Any]) -> RawData:
    return RawData(
        source=source,
        folder=workspace,
        files=(f"{source}.npz",),
        read_users=SiloFileReader(data.num_classes, brightest=_BRIGHTEST),
        are_images=True,
        has_test_examples=True,
        parameters=parameters,
    )


def _check_features(data: DataConfig, shape: tuple[int, ...], num_classes: int) -> None:
    if (data.input_shape, data.num_classes) != (shape, num_classes):
        raise ConfigError(
            f"data.input_shape and data.num_classes are {list(data.input_shape)} and {data.num_classes}; "
            f"{data.source} has {list(shape)} and {num_classes}"
        )
