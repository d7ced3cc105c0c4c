"""Reads datasets of TensorFlow Datasets, with a feature that names the client or a division of all examples.

A dataset is given by the name of its builder (`emnist/byclass:3.1.0`, `cifar10`) or by its prepared folder. Prepared
files alone are read, and nothing is downloaded, unless `download` is set.

The package, and TensorFlow with the package, are imported only to read a dataset.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.sources.divided import (
    ByClasses,
    Dirichlet,
    DirichletUnequal,
    Shards,
    Uniform,
    partitioned_images,
    recorded_partition,
    silo_of,
)
from beam_pipelines.sources.images import ImageDataset, Images, resized
from beam_pipelines.sources.silo_files import SiloArrays, array_data
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Name, Settings, to_plain

# Number of examples of fixed shape that TensorFlow hands over together.
_BATCH = 256
_FEATURES_FILE = "features.json"


class ByFeature(Settings, tag_field="kind", tag="feature"):
    """Makes a client of all examples with the same value of a feature, such as the writer or the person.

    Attributes:
      client_feature: name of the feature: text, a class label, or a whole number. The client of a number has the name
        `<feature>_00012`.
    """

    has_equal_sizes: ClassVar[bool] = False
    client_feature: Name


class Tfds(SourceSettings):
    """Reads a dataset of TensorFlow Datasets; clients are given by a feature, or examples are divided among clients.

    `input` is the name of a builder, such as `mnist`, `emnist/byclass:3.1.0` or `celeb_a`, or the folder of one
    prepared version, such as `/data/tfds/mnist/3.0.1`. Images (8-bit values of shape `[height, width, channels]`) of
    another size are resized to `input_shape`: each pixel is the average of an area. Other features are read as numbers.
    If the label has names, the manifest lists the names of the classes.

    Attributes:
      partition: `kind: feature` groups examples by a feature; all other kinds divide the examples of all clients, as
        `partitioned_images` does.
      feature: name of the feature that is the input, with `/` before the name of an inner feature; or a list of names,
        whose values are joined to one vector.
      label: name of the label's feature: a class label, truth value or whole number; a regression may have any number.
      train_split: split, in the notation of TensorFlow Datasets (`train`, `train+validation`, `train[:10%]`), of the
        examples for training and validation.
      test_split: split of the test examples. Without a split, `test_fraction` of each client's examples are test
        examples.
      test_partition: `same`: test examples are divided as training examples are. `uniform`: each client gets an equal
        share of all test examples, drawn at random. Not for `kind: feature`.
      swap_axes: swap the rows and columns of every image. The files of EMNIST have columns in place of rows.
      data_dir: folder in which TensorFlow Datasets keeps prepared datasets; default: `~/tensorflow_datasets`.
      download: download and prepare a dataset that `data_dir` lacks; needs network access and runs the builder's code.
    """

    partition: ByFeature | ByClasses | Dirichlet | DirichletUnequal | Shards | Uniform
    feature: Name | tuple[Name, ...] = "image"
    label: Name = "label"
    train_split: Name = "train"
    test_split: Name | None = None
    test_partition: Literal["same", "uniform"] = "same"
    swap_axes: bool = False
    data_dir: str | None = None
    download: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.feature == ():
            raise ValueError("feature must name at least one feature")
        if self.test_partition == "uniform" and (isinstance(self.partition, ByFeature) or self.test_split is None):
            raise ValueError(
                "test_partition uniform needs a test_split, and clients that are not given by a feature: leave out "
                "test_partition"
            )

    def build(self, workspace: Path) -> RawData:
        """Reads the dataset and writes the clients to `workspace/tfds.npz`; errors as in `SourceSettings.build`."""
        builder = open_builder(self.input, self.data_dir, download=self.download)
        reader = _Reader.of(builder, self)
        train, *test = (reader.read(split) for split in (self.train_split, self.test_split) if split is not None)
        # Without test examples of its own, a dataset has an empty side.
        nothing = _Side(train.examples[np.zeros(0, np.int64)], train.owners[:0])
        raw = array_data(
            self.kind,
            workspace,
            self._clients(train, *(test or [nothing])),
            self.num_classes,
            self._parameters(builder),
            are_images=reader.are_images,
        )
        return dataclasses.replace(raw, has_test_examples=bool(test), class_names=reader.class_names)

    def _clients(self, train: "_Side", test: "_Side") -> Iterator[SiloArrays]:
        if isinstance(self.partition, ByFeature):
            silos = clients_by_owner(train.examples, train.owners, test.examples, test.owners)
        else:
            dataset = ImageDataset(train.examples, test.examples, self.num_classes, origin=())
            silos = partitioned_images(dataset, self.partition, 1, self.seed, test_partition=self.test_partition)
        # Only a dataset with test examples of its own says which examples are for test.
        return silos if self.test_split is not None else (dataclasses.replace(one, is_test=None) for one in silos)

    def _parameters(self, builder: Any) -> dict[str, Any]:
        names = ("feature", "label", "train_split", "test_split", "test_partition", "swap_axes")
        given, folder = to_plain(self), Path(builder.data_dir)
        splits = (split for split in (self.train_split, self.test_split) if split is not None)
        files = {name for split in splits for name in builder.info.splits[split].filenames}
        return {
            "builder": builder.info.full_name,
            **{name: given[name] for name in names},
            **recorded_partition(self.partition),
            "origin": [dataclasses.asdict(FileRecord.of(folder, name)) for name in sorted(files)],
        }


def open_builder(name: str, data_dir: str | None, *, download: bool) -> Any:
    """Opens a prepared dataset by its folder or by the name of its builder: a `tfds.core.DatasetBuilder`.

    Args:
      name: folder of one prepared version, or name of a builder, with config and version where needed.
      data_dir: folder of prepared datasets; None is TensorFlow Datasets' own default.
      download: whether a dataset that is not there is downloaded and prepared.

    Raises:
      DataError: the dataset is not there, or its metadata cannot be read.
    """
    # Imported late: the check of the settings needs no TensorFlow.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.read_only_builder import builder_from_files

    folder = Path(name).expanduser()
    try:
        if (folder / _FEATURES_FILE).is_file():
            return tfds.builder_from_directory(folder)
        if folder.is_absolute():
            found = sorted(str(file.parent.relative_to(folder)) for file in folder.glob(f"**/{_FEATURES_FILE}"))
            advice = f"; prepared versions in it: {', '.join(found)}" if found else ""
            raise DataError(
                f"{folder}: no {_FEATURES_FILE} in it; data.input must be the folder of one prepared version{advice}"
            )
        try:
            return builder_from_files(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError:
            if not download:
                raise
        builder = tfds.builder(name, data_dir=data_dir)
        builder.download_and_prepare()
        return builder
    except DataError:
        raise
    # A builder's own code may raise anything.
    except Exception as error:
        raise DataError(
            f"data.input {name}: cannot be opened: {_first_line(error)}; name a prepared dataset, with data.data_dir "
            "if TensorFlow Datasets keeps it elsewhere, or set data.download to true"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


@dataclasses.dataclass(frozen=True)
class _Side:
    """Examples of one split, and the client of each example, `[n]`; without clients, every client is empty text."""

    examples: Images
    owners: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads splits of a builder as arrays.

    Attributes:
      builder: the opened dataset.
      inputs: names of the features that are the input.
      label: name of the label's feature.
      client: name of the feature that names the client; None if examples are divided.
      shape: shape of one example.
      are_images: whether examples are images of 8-bit pixels, which may be resized; otherwise, they are numbers.
      swaps_axes: whether rows and columns of images are swapped.
      label_dtype: int64, or float32 for a regression.
      class_names: name of each class, by label; None if the label has no names.
    """

    builder: Any
    inputs: tuple[str, ...]
    label: str
    client: str | None
    shape: tuple[int, ...]
    are_images: bool
    swaps_axes: bool
    label_dtype: type
    class_names: tuple[str, ...] | None

    @classmethod
    def of(cls, builder: Any, settings: Tfds) -> "_Reader":
        """Compares the settings with the features of the builder.

        Raises:
          ConfigError: a feature does not exist, or has another type or shape than its use needs.
        """
        features = builder.info.features
        inputs = (settings.feature,) if isinstance(settings.feature, str) else settings.feature
        found = [_feature(features, name, "data.feature") for name in inputs]
        are_images = len(found) == 1 and _dtype(found[0]) == np.uint8 and len(found[0].shape) == 3
        shape = settings.input_shape if are_images else _shape_of_numbers(inputs, found)
        label = _feature(features, settings.label, "data.label")
        _check_label(settings, label)
        num_classes = getattr(label, "num_classes", None) or settings.num_classes
        settings.check_features(shape, num_classes if settings.num_classes else 0)
        if are_images and len(settings.input_shape) != 3:
            raise ConfigError(
                f"data.input_shape is {list(settings.input_shape)}; feature {inputs[0]} has images, which need height, "
                "width and channels"
            )
        if settings.swap_axes and not are_images:
            raise ConfigError(f"data.swap_axes is for images; feature {', '.join(inputs)} has none")
        client = settings.partition.client_feature if isinstance(settings.partition, ByFeature) else None
        if client is not None:
            _check_client(client, _feature(features, client, "data.partition.client_feature"))
        names = getattr(label, "names", None) if settings.num_classes else None
        return cls(
            builder,
            inputs,
            settings.label,
            client,
            shape,
            are_images,
            settings.swap_axes,
            np.int64 if settings.num_classes else np.float32,
            tuple(map(str, names)) if names else None,
        )

    def read(self, split: str) -> _Side:
        """Reads all examples of a split into memory; shows a progress bar.

        Raises:
          ConfigError: the builder has no such split.
          DataError: a file is missing or damaged, or an image has other channels than the settings.
        """
        known = self.builder.info.splits
        try:
            count = known[split].num_examples
        # The parser of splits raises errors of several types.
        except Exception as error:
            raise ConfigError(
                f"{self._title}: no split {split!r}: {_first_line(error)}; splits: {', '.join(sorted(known))}"
            ) from error
        x = np.empty((count, *self.shape), np.uint8 if self.are_images else np.float32)
        y, owners = np.empty(count, self.label_dtype), [""] * count
        place = 0
        try:
            for example in tqdm(self._examples(split), desc=f"read {split}", total=count, unit="example"):
                x[place] = self._input(example)
                y[place] = example[self.label]
                if self.client is not None:
                    owners[place] = self._owner(example[self.client])
                place += 1
        # TensorFlow, the readers of ArrayRecord and the decoding of text raise errors of their own types.
        except Exception as error:
            raise DataError(
                f"{self._title}: split {split!r}, example {place} (the first is 0): {_first_line(error)}"
            ) from error
        if place != count:
            raise DataError(f"{self._title}: split {split!r} has {place} examples, but its metadata states {count}")
        return _Side(Images(x, y), np.array(owners, object))

    @property
    def _title(self) -> str:
        return f"{self.builder.info.full_name} in {self.builder.data_dir}"

    def _examples(self, split: str) -> Iterator[Mapping[str, Any]]:
        """Yields the needed features of each example by name, always in the same order."""
        import tensorflow_datasets as tfds

        names = [*self.inputs, self.label, *([self.client] if self.client is not None else [])]
        if self.builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
            source = self.builder.as_data_source(split=split)
            return ({name: _value(example, name) for name in names} for example in source)
        dataset = self.builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders=tfds.decode.PartialDecoding(_nested(names)),
            read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
        )
        found = [_feature(self.builder.info.features, name, "") for name in names]
        if any(None in feature.shape for feature in found):
            return ({name: _value(example, name) for name in names} for example in tfds.as_numpy(dataset))
        return (
            dict(zip(names, values, strict=True))
            for batch in tfds.as_numpy(dataset.batch(_BATCH))
            for values in zip(*(_value(batch, name) for name in names), strict=True)
        )

    def _input(self, example: Mapping[str, Any]) -> np.ndarray:
        if not self.are_images:
            values = [np.asarray(example[name], np.float32).ravel() for name in self.inputs]
            return np.concatenate(values).reshape(self.shape)
        image = np.asarray(example[self.inputs[0]])
        return resized(image.swapaxes(0, 1) if self.swaps_axes else image, self.shape)

    def _owner(self, value: Any) -> str:
        feature = _feature(self.builder.info.features, self.client or "", "")
        if hasattr(feature, "int2str"):
            return feature.int2str(int(value))
        if isinstance(value, bytes | str):
            return value.decode() if isinstance(value, bytes) else value
        return f"{(self.client or '').rpartition('/')[2]}_{int(value):05d}"


def _feature(features: Any, name: str, key: str) -> Any:
    """Returns the feature of a name such as `attributes/Smiling`; raises ConfigError, which names the setting `key`."""
    feature = features
    for part in name.split("/"):
        if not _has_inner_features(feature) or part not in feature:
            raise ConfigError(f"{key}: no feature {name!r}; known: {', '.join(_names(features))}")
        feature = feature[part]
    if _has_inner_features(feature):
        raise ConfigError(f"{key}: {name!r} has inner features; name one of {', '.join(_names(feature, f'{name}/'))}")
    return feature


def _dtype(feature: Any) -> np.dtype:
    # The attribute is a type of NumPy for some features, and a `dtype` for others.
    return np.dtype(feature.np_dtype)


def _has_inner_features(feature: Any) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.FeaturesDict)


def _names(features: Any, prefix: str = "") -> Iterator[str]:
    for name, feature in sorted(features.items()):
        if _has_inner_features(feature):
            yield from _names(feature, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"


def _nested(names: Sequence[str]) -> dict[str, Any]:
    """Returns names such as `a/b` as nested mappings, `{"a": {"b": True}}`."""
    nested: dict[str, Any] = {}
    for name in names:
        *outer, last = name.split("/")
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = True
    return nested


def _value(example: Any, name: str) -> Any:
    for part in name.split("/"):
        example = example[part]
    return example


def _shape_of_numbers(names: Sequence[str], features: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of an input of numbers: the shape of one feature, or a vector of several features' values."""
    for name, feature in zip(names, features, strict=True):
        if _dtype(feature).kind not in "biuf" or None in feature.shape:
            raise ConfigError(
                f"data.feature: {name!r} has type {_dtype(feature)} and shape {list(feature.shape)}; needed are "
                "numbers of a fixed shape, or an 8-bit image"
            )
    if len(features) == 1 and features[0].shape:
        return tuple(features[0].shape)
    return (sum(math.prod(feature.shape) for feature in features),)


def _check_label(settings: Tfds, feature: Any) -> None:
    kinds = "biu" if settings.num_classes else "biuf"
    if feature.shape != () or _dtype(feature).kind not in kinds:
        wanted = "one whole number or truth value" if settings.num_classes else "one number"
        raise ConfigError(
            f"data.label: {settings.label!r} has type {_dtype(feature)} and shape {list(feature.shape)}; needed is "
            f"{wanted} for each example"
        )


def _check_client(name: str, feature: Any) -> None:
    if feature.shape != () or _dtype(feature).kind not in "iuOSU":
        raise ConfigError(
            f"data.partition.client_feature: {name!r} has type {_dtype(feature)} and shape {list(feature.shape)}; "
            "needed is one text, class label or whole number for each example"
        )


def clients_by_owner(
    train: Images, train_owners: np.ndarray, test: Images, test_owners: np.ndarray
) -> Iterator[SiloArrays]:
    """Makes a client of each owner, one at a time, sorted by name; the owners are names of clients, `[n]`.

    Yields:
      Clients with their train examples, followed by their test examples, each in the order of its side.
    """
    owners = sorted({*train_owners.tolist(), *test_owners.tolist()})
    parts = (_places_by_owner(side, owners) for side in (train_owners, test_owners))
    for owner, in_train, in_test in zip(owners, *parts, strict=True):
        yield silo_of(owner, train[in_train], test[in_test], lambda x: x)


def _places_by_owner(side: np.ndarray, owners: Sequence[str]) -> list[np.ndarray]:
    """Returns the positions of each owner's examples, int64, in increasing order."""
    place_of = {owner: place for place, owner in enumerate(owners)}
    numbers = np.array([place_of[owner] for owner in side.tolist()], np.int64)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.searchsorted(numbers[order], np.arange(1, len(owners))))
