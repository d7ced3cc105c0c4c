"""Divides pooled images among artificial clients.

| partition | clients | source |
|---|---|---|
| `classes` | a few classes each, in uneven shares | Shamsian et al., ICML 2021; Liu, 2023, appendix B.1 |
| `dirichlet` | same number of images each, in Dirichlet-distributed mixes of classes | Hsu, Qi and Brown, 2019 |
| `dirichlet_unequal` | Dirichlet-distributed shares of each class, so unequal sizes | Yurochkin et al., ICML 2019 |
| `shards` | the same number of label-sorted shards of equal size each | McMahan et al., AISTATS 2017 ("non-IID") |
| `uniform` | same number of images each, drawn at random from all images | McMahan et al., AISTATS 2017 ("IID") |

The sources are: Shamsian et al., "Personalized Federated Learning using Hypernetworks"; Liu, "On Privacy and
Personalization in Machine Learning", CMU-RI-TR-23-17; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification"; Yurochkin et al., "Bayesian Nonparametric Federated Learning of
Neural Networks"; McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data". Unlike
the published code of Shamsian et al., `classes` assigns every image, in spite of rounding.

A data set's own test images are the test examples. With `test_partition: same` each client is tested on its own mix of
classes. With `test_partition: uniform` every client gets an equal share, drawn at random, of all test images: each test
image is in exactly one client, so a shared model's accuracy over all clients' test examples is the accuracy on the
data set's own test images.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.sources.cifar import read_cifar10, read_cifar100
from beam_pipelines.sources.images import ImageDataset, Images, shrunk, shrunken_shape
from beam_pipelines.sources.mnist import FASHION_MNIST_FOLDER, read_emnist, read_fashion_mnist, read_mnist
from beam_pipelines.sources.partition import (
    draw_class_mixes,
    draw_class_shares,
    draw_dirichlet_shares,
    partition_by_class_mixes,
    partition_by_shards,
    partition_by_shares,
    uniform_partition,
)
from beam_pipelines.sources.silo_files import SiloArrays, array_data
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, CountOrZero, Name, Positive, Settings, to_plain

# Labels of one side of a data set, and the random stream that divides them.
Side = tuple[np.ndarray, np.random.Generator]

# Each has its own random stream: another train side does not change the division of the test side.
_SHARES, _TRAIN, _TEST, _POOL = range(4)
_POOLED_IMAGES: dict[str, Callable[[str], ImageDataset]] = {
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "mnist": lambda source: read_mnist(Path(source)),
    "emnist": lambda source: read_emnist(Path(source)),
}


class ByClasses(Settings, tag_field="kind", tag="classes"):
    """Gives each client images of a few classes, in uneven shares.

    Attributes:
      num_clients: number of clients.
      classes_per_client: number of classes that each client has images of; `num_clients * classes_per_client` must be a
        multiple of the number of classes.
    """

    has_equal_sizes: ClassVar[bool] = False
    num_clients: Count
    classes_per_client: Count

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Divides train and test images (`sides`) by the same shares; returns the images' positions by side and client.

        Raises:
          ConfigError: the images cannot be divided in this way.
        """
        each = self.classes_per_client
        if self.num_clients * each % num_classes or each > num_classes:
            raise ConfigError(
                f"data.partition: {self.num_clients} clients with {each} of {num_classes} classes: num_clients * "
                f"classes_per_client must be a multiple of {num_classes}, and classes_per_client at most {num_classes}"
            )
        drawn = draw_class_shares(self.num_clients, num_classes, each, shares)
        return [partition_by_shares(labels, drawn, stream) for labels, stream in sides]


class Dirichlet(Settings, tag_field="kind", tag="dirichlet"):
    """Gives all clients the same number of images, each client in its own mix of classes.

    Attributes:
      num_clients: number of clients.
      concentration: Dirichlet parameter. Small values (0.1) give each client few classes, large values (100) give all
        clients the same mix.
    """

    has_equal_sizes: ClassVar[bool] = True
    num_clients: Count
    concentration: Positive

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Returns the positions of each client's images for each side, as `ByClasses.divide` does."""
        mixes = draw_class_mixes(self.num_clients, num_classes, self.concentration, shares)
        return [partition_by_class_mixes(labels, mixes, stream) for labels, stream in sides]


class DirichletUnequal(Settings, tag_field="kind", tag="dirichlet_unequal"):
    """Divides each class among the clients in Dirichlet-distributed shares, so clients have different sizes.

    Attributes:
      num_clients: number of clients.
      concentration: Dirichlet parameter. Small values (0.1) give each client few classes and very different numbers of
        images, large values (100) give all clients the same mix and the same number.
      min_images: smallest number of training images of a client; all shares are drawn again until every client has at
        least this number.
    """

    has_equal_sizes: ClassVar[bool] = False
    num_clients: Count
    concentration: Positive
    min_images: Count = 10

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Divides train and test images by the same shares, as `ByClasses.divide` does.

        Raises:
          ConfigError: in each of 1,000 draws, some client had fewer than `min_images` training images.
        """
        train = sides[0][0]
        drawn = draw_dirichlet_shares(train, self.num_clients, num_classes, self.concentration, self.min_images, shares)
        if drawn is None:
            raise ConfigError(
                f"data.partition.min_images: {len(train)} training images could not be divided among "
                f"{self.num_clients} clients with at least {self.min_images} each at concentration "
                f"{self.concentration}; raise concentration, or lower num_clients or min_images"
            )
        return [partition_by_shares(labels, drawn, stream) for labels, stream in sides]


class Shards(Settings, tag_field="kind", tag="shards"):
    """Sorts the images by class, cuts them into shards of equal size, and deals the shards to the clients at random.

    Sizes of shards differ by one image at most; with `images_per_client` they are equal.

    Attributes:
      num_clients: number of clients.
      shards_per_client: number of shards of each client; with 2, most clients have images of two classes.
    """

    has_equal_sizes: ClassVar[bool] = True
    num_clients: Count
    shards_per_client: Count

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Divides train and test images by the same deal, as `ByClasses.divide` does.

        Raises:
          ConfigError: there are more shards than training images.
        """
        num_shards = self.num_clients * self.shards_per_client
        if num_shards > len(sides[0][0]):
            raise ConfigError(
                f"data.partition: {self.num_clients} clients with {self.shards_per_client} shards each need "
                f"{num_shards} training images, but there are {len(sides[0][0])}; lower num_clients or "
                "shards_per_client"
            )
        deal = shares.permutation(num_shards).reshape(self.num_clients, self.shards_per_client)
        return [partition_by_shards(labels, deal, stream) for labels, stream in sides]


class Uniform(Settings, tag_field="kind", tag="uniform"):
    """Gives all clients the same number of images, drawn at random from all images.

    Attributes:
      num_clients: number of clients.
    """

    has_equal_sizes: ClassVar[bool] = True
    num_clients: Count

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Returns the positions of each client's images for each side, as `ByClasses.divide` does."""
        return [uniform_partition(len(labels), self.num_clients, stream) for labels, stream in sides]


Partition = ByClasses | Dirichlet | DirichletUnequal | Shards | Uniform


class DividedImages(SourceSettings):
    """Divides pooled images among artificial clients; the base class of the kinds that do so.

    The data set's own test images are divided too and are the test examples; `test_fraction` is not used. `seed`
    decides which client gets which images.

    Attributes:
      partition: how the images are divided among the clients.
      images_per_client: number of images that each client gets for training and validation. The images of all clients
        together are drawn at random from the training images and then divided; by default, all training images are
        divided. Only for partitions into equal sizes: `dirichlet`, `shards` and `uniform`.
      training_images: number of images of all clients together for training and validation, drawn at random from the
        training images and then divided; by default, all training images are divided. Only for partitions into unequal
        sizes: `classes` and `dirichlet_unequal`.
      test_partition: `same`: test images are divided as training images are, so each client is tested on its own mix of
        classes. `uniform`: each client gets an equal share of all test images, drawn at random.
      shrink: side, in pixels, of the squares that are each averaged to one pixel; 1 keeps the images unchanged.
    """

    partition: Partition
    images_per_client: Count | None = None
    training_images: Count | None = None
    test_partition: Literal["same", "uniform"] = "same"
    shrink: Count = 1

    def __post_init__(self):
        super().__post_init__()
        if self.training_images is not None and self.partition.has_equal_sizes:
            raise ValueError(
                f"training_images {self.training_images} is for clients of unequal size; partition "
                f"{to_plain(self.partition)['kind']} makes clients of equal size: set images_per_client instead"
            )
        given, partition = self.images_per_client, self.partition
        if given is None:
            return
        if not partition.has_equal_sizes:
            raise ValueError(
                f"images_per_client {given} needs clients of equal size, which partition {to_plain(partition)['kind']} "
                "does not make; leave out images_per_client, or choose partition dirichlet, shards or uniform"
            )
        if isinstance(partition, Shards) and given % partition.shards_per_client:
            raise ValueError(
                f"images_per_client {given} must be a multiple of partition.shards_per_client "
                f"{partition.shards_per_client}, so that shards have equal size"
            )

    def divide(self, workspace: Path, dataset: ImageDataset, parameters: Mapping[str, Any]) -> RawData:
        """Writes the clients' images to `workspace/<kind>.npz`; `parameters` are recorded in the manifest.

        Raises:
          ConfigError: a setting does not suit the images.
        """
        self.check_features(shrunken_shape(dataset.train.x.shape[1:], self.shrink), dataset.num_classes)
        clients = partitioned_images(
            dataset,
            self.partition,
            self.shrink,
            self.seed,
            images_per_client=self.images_per_client,
            training_images=self.training_images,
            test_partition=self.test_partition,
        )
        given = dict.fromkeys(("num_clients", "classes_per_client", "concentration"))
        recorded = {**parameters, **given, **recorded_partition(self.partition), "shrink": self.shrink}
        # Recorded only where set: client datasets from before these settings existed remain valid.
        if self.images_per_client is not None:
            recorded["images_per_client"] = self.images_per_client
        if self.training_images is not None:
            recorded["training_images"] = self.training_images
        if self.test_partition != "same":
            recorded["test_partition"] = self.test_partition
        recorded["origin"] = dataset.origin
        return array_data(self.kind, workspace, clients, self.num_classes, recorded)


def recorded_partition(partition: Settings) -> dict[str, Any]:
    """Returns the settings of a partition as a manifest records them, with the kind as `partition`."""
    given = to_plain(partition)
    return {"partition": given.pop("kind"), **given}


class PartitionedImages(DividedImages):
    """Divides pooled images among artificial clients; `beam_pipelines.sources.divided` cites the partitions' sources.

    | images | `input` |
    |---|---|
    | `cifar10`, `cifar100` | the python version's archive, or its extracted folder |
    | `mnist` | the folder of MNIST's four `idx.gz` files, or of data in that format |
    | `emnist` | the folder of one split's four `idx.gz` files, or one split's file of train images |

    Attributes:
      images: image data set; `cifar100` has its 100 fine classes.
    """

    images: Literal["cifar10", "cifar100", "mnist", "emnist"]

    def build(self, workspace: Path) -> RawData:
        """Writes the clients' images to `workspace/partitioned_images.npz`; errors as in `SourceSettings.build`."""
        return self.divide(workspace, _POOLED_IMAGES[self.images](self.input), {"images": self.images})


class FashionMnist(DividedImages):
    """Divides Fashion-MNIST, 28 x 28 grey images of ten kinds of clothes, as `partitioned_images` divides MNIST.

    Source: Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", arXiv:1708.07747, 2017: 60,000 training and 10,000 test images, in MNIST's format.

    Attributes:
      input: folder of the four `idx.gz` files; default: the folder of Debian's package `dataset-fashion-mnist`.
    """

    input: Name = FASHION_MNIST_FOLDER
    num_classes: CountOrZero = 10

    def build(self, workspace: Path) -> RawData:
        """Writes the clients' images to `workspace/fashion_mnist.npz`; errors as in `SourceSettings.build`."""
        return self.divide(workspace, read_fashion_mnist(Path(self.input)), {})


def partitioned_images(
    dataset: ImageDataset,
    partition: Partition,
    shrink: int,
    seed: int,
    *,
    images_per_client: int | None = None,
    training_images: int | None = None,
    test_partition: Literal["same", "uniform"] = "same",
) -> Iterator[SiloArrays]:
    """Makes the clients `silo_000`, ..., one at a time; the same arguments give the same clients.

    Args:
      dataset: train and test images.
      partition: how train images are divided.
      shrink: side, in pixels, of the squares that are each averaged to one pixel.
      seed: seed of all draws, a public number.
      images_per_client: number of train images of each client; None divides all train images. The images of all
        clients together are drawn at random from the train images, and then divided. The partition must make clients of
        equal size.
      training_images: number of train images of all clients together, drawn at random from the train images and then
        divided; None divides all train images.
      test_partition: `same`: test images are divided as train images are; `uniform`: evenly and at random.

    Returns:
      Clients: x uint8 `[n, height / shrink, width / shrink, channels]`, y int64 `[n]`; test images are test examples.
      With `shrink` 1, `x` may be any array, as in `Images`.

    Raises:
      ConfigError: the images cannot be divided in this way.
    """
    num_clients = partition.num_clients
    if num_clients > len(dataset.train.y):
        raise ConfigError(
            f"data.partition: {len(dataset.train.y)} training images cannot be divided among {num_clients} clients; "
            "lower num_clients"
        )
    shares_stream, train_stream, test_stream, pool_stream = (
        np.random.default_rng([seed, purpose]) for purpose in (_SHARES, _TRAIN, _TEST, _POOL)
    )
    pool = _draw_pool(len(dataset.train.y), num_clients, images_per_client, training_images, pool_stream)
    sides = [(dataset.train.y[pool], train_stream)]
    if test_partition == "same":
        sides.append((dataset.test.y, test_stream))
    train_parts, *test_parts = partition.divide(sides, dataset.num_classes, shares_stream)
    if test_partition == "uniform":
        test_parts = [uniform_partition(len(dataset.test.y), num_clients, test_stream)]
    width = max(3, len(str(num_clients - 1)))
    # A client's name decides its random numbers in training: another name would change published results.
    names = (f"silo_{client:0{width}d}" for client in range(num_clients))
    return (
        silo_of(name, dataset.train[pool[train_part]], dataset.test[test_part], lambda x: shrunk(x, shrink))
        for name, train_part, test_part in zip(names, train_parts, *test_parts, strict=True)
    )


def _draw_pool(
    num_images: int,
    num_clients: int,
    images_per_client: int | None,
    training_images: int | None,
    generator: np.random.Generator,
) -> np.ndarray:
    """Draws the train images that are divided: their sorted positions, int64 `[n]`; all if no number is given."""
    if images_per_client is not None:
        wanted = num_clients * images_per_client
        if wanted > num_images:
            raise ConfigError(
                f"data.images_per_client: {num_clients} clients with {images_per_client} images each need {wanted} "
                f"training images, but there are {num_images}; lower images_per_client or partition.num_clients"
            )
    elif training_images is not None:
        wanted = training_images
        if wanted > num_images:
            raise ConfigError(
                f"data.training_images: {wanted} training images are wanted, but there are {num_images}; lower "
                "training_images"
            )
    else:
        return np.arange(num_images)
    return np.sort(generator.permutation(num_images)[:wanted])


def silo_of(name: str, train: Images, test: Images, change: Callable[[np.ndarray], np.ndarray]) -> SiloArrays:
    """Makes a silo of changed train images, followed by changed test images, which are test examples."""
    x = np.concatenate([train.x, test.x])
    return SiloArrays(name, change(x), np.concatenate([train.y, test.y]), np.arange(len(x)) >= len(train.y))
