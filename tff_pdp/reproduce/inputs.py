"""Finds the raw data of published experiments, and computes digests of data and source code."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path

import beam_pipelines
import tff_pdp
from beam_pipelines.options import GENERATED
from beam_pipelines.sources.mnist import FASHION_MNIST_FOLDER
from tff_pdp.errors import DataError

DATA_VARIABLE = "TFF_PDP_DATA"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The raw data of an experiment.

    Attributes:
      paths: possible paths of the data in the data folder, the preferred path first; none for generated data.
      origin: source of the data, for error messages.
      beside: names of further files or folders in the folder of the data; they are read if they exist.
    """

    paths: tuple[str, ...]
    origin: str
    beside: tuple[str, ...] = ()


MADE_UP = "made_up"
# By the name that settings have for them.
INPUTS = {
    MADE_UP: Inputs((), "generated when they are prepared"),
    "school": Inputs(("school/school.mat",), "data/school/school.mat of github.com/kenziyuliu/private-cross-silo-fl"),
    "vehicle": Inputs(("vehicle/mytrain.json",), "the SensIT vehicle data as LEAF-like JSON, one user a sensor"),
    "cifar10": Inputs(
        ("cifar10/cifar-10-python.tar.gz", "cifar10/cifar-10-batches-py", "cifar10/cifar-10-python-subset.tar.gz"),
        "the python version of CIFAR-10, from www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "mnist": Inputs(("mnist",), "the four idx.gz files of MNIST"),
    "fashion_mnist": Inputs(
        # A whole path stays as it is in any data folder.
        ("fashion-mnist", FASHION_MNIST_FOLDER),
        "the four idx.gz files of Fashion-MNIST, as in Debian's package dataset-fashion-mnist",
    ),
    "mnist_writers": Inputs(
        ("mnist",),
        "the four idx.gz files of MNIST, and in it or in mnist_writers beside it QMNIST's "
        "qmnist-train-labels-idx2-int.gz",
        beside=("mnist_writers",),
    ),
    "emnist_digits": Inputs(
        ("emnist/emnist-digits-train-images-idx3-ubyte.gz",),
        "the four idx.gz files of EMNIST's split `digits`, from www.nist.gov/itl/products-and-services/emnist-dataset",
        beside=(
            "emnist-digits-train-labels-idx1-ubyte.gz",
            "emnist-digits-test-images-idx3-ubyte.gz",
            "emnist-digits-test-labels-idx1-ubyte.gz",
        ),
    ),
    "fed_emnist": Inputs(
        ("fed_emnist/emnist_all.sqlite.lzma", "fed_emnist/emnist_all.sqlite", "fed_emnist"),
        "Federated EMNIST of TensorFlow Federated: emnist_all.sqlite, or its two older .h5 files",
    ),
    "contacts": Inputs(
        ("contacts",), "a folder for each network with tij_*.dat.gz and metadata_*.dat of SocioPatterns"
    ),
}


def find_input(inputs: Inputs, folder: str | None) -> Path:
    """Returns the path of the raw data, or the path `generated` for generated data, which need no folder.

    `folder` has all raw data; if `folder` is None, the environment variable TFF_PDP_DATA names the folder.

    Raises:
      DataError: no folder is named, or the folder does not contain the data.
    """
    if not inputs.paths:
        return Path(GENERATED)
    named = folder or os.environ.get(DATA_VARIABLE)
    if not named:
        raise DataError(f"give the folder that contains {inputs.paths[0]}: --data DIR, or set {DATA_VARIABLE}")
    for name in inputs.paths:
        path = Path(named) / name
        if path.exists():
            return path.absolute()
    raise DataError(f"{named} contains none of: {', '.join(inputs.paths)} ({inputs.origin})")


def digest_of_data(inputs: Inputs, path: Path) -> str:
    """Computes a sha256 of the raw data at a path from `find_input`, including the files `inputs.beside`.

    For generated data, the result is the sha256 of the modules of `beam_pipelines`, which generate the data.
    """
    if not inputs.paths:
        return digest_of(Path(beam_pipelines.__file__).parent, "*.py")
    parts = [path, *filter(Path.exists, (path.parent / name for name in inputs.beside))]
    digests = [digest_of(part) for part in parts]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def digest_of(path: Path, pattern: str = "*") -> str:
    """Computes a sha256 of a file, or of the names and contents of a folder's files that match the pattern."""
    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob(pattern) if file.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(f"{file.relative_to(path)}:{file.stat().st_size}:".encode())
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


@functools.cache
def digest_of_sources() -> str:
    """Computes a sha256 of this project's modules; stored results are used again only if the sha256 is equal."""
    packages = (tff_pdp, beam_pipelines)
    digests = [digest_of(Path(str(package.__file__)).parent, "*.py") for package in packages]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
