"""Writes a copy of a client dataset that TensorFlow Datasets reads, beside the dataset's own shards.

TensorFlow Datasets takes all records of a file for examples of one split, and reads a client's id from the record. The
dataset's own shards have several splits in a file, and the ids of clients in the index. So the copy has the same
records in other files, each record followed by the client's id:

  <dataset>/tfds/client_dataset-train.tfrecord-00000-of-00002   tf.Example records, sorted by client
  <dataset>/tfds/features.json                                  types of the features
  <dataset>/tfds/dataset_info.json                              number of examples in each file

A message of protobuf that follows another one is merged with the other one, so no record is decoded.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.example_codec import text_feature
from tff_pdp.data.manifest import SPLITS, TFDS_FOLDER, Manifest
from tff_pdp.data.tfrecord import frame
from tff_pdp.files import atomic_file, remove_tree, sync
from tff_pdp.lock import only_writer

_NAME, _VERSION = "client_dataset", "1.0.0"
_CLIENT_ID = "client_id"


def write_tfds_copy(path: Path) -> Path:
    """Writes the folder `tfds` of a client dataset, unless the folder exists; takes as much disk as the dataset.

    `tfds.builder_from_directory` opens the folder. An example has the features `client_id` and `example_id` (text),
    `x` (values as stored: float32, or uint8 from 0 to 255) and `y` (class label, or float32 for a regression). Splits
    without examples are left out.

    Args:
      path: folder of a finished client dataset.

    Returns:
      The written folder.

    Raises:
      DataError: the dataset is missing or unfinished, a record is corrupt, or another process writes the copy.
    """
    folder = path / TFDS_FOLDER
    with only_writer(path):
        if folder.exists():
            return folder
        dataset = ClientDataset.open(path)
        staging = path / f".{TFDS_FOLDER}.unfinished"
        remove_tree(staging, ignore_errors=True)
        staging.mkdir()
        with tqdm(desc="write tfds", total=dataset.manifest.kept.examples, unit="example") as bar:
            splits = {split: _write_split(dataset, split, staging, bar) for split in SPLITS}
        _write_metadata(dataset.manifest, {split: files for split, files in splits.items() if files}, staging)
        for file in staging.iterdir():
            sync(file)
        sync(staging)
        staging.rename(folder)
        sync(path)
    return folder


def _write_split(dataset: ClientDataset, split: str, folder: Path, bar: Any) -> list[tuple[int, int]]:
    """Writes the files of one split, at most as many as the dataset has shards.

    Returns:
      For each file the number of examples and the number of bytes of the records; none if the split has no examples.
    """
    clients = [dataset.client_ids[place] for place in np.flatnonzero(dataset.sizes(split))]
    num_files = min(len(clients), len(dataset.manifest.shards))
    files = []
    for number, part in enumerate(np.array_split(np.array(clients, object), num_files) if num_files else ()):
        count = nbytes = 0
        name = f"{_NAME}-{split}.tfrecord-{number:05d}-of-{num_files:05d}"
        # Flushed with all other files of the folder.
        with atomic_file(folder / name, is_durable=False) as file:
            for client in part.tolist():
                records = list(_records(dataset, client, split))
                file.write(b"".join(map(frame, records)))
                count += len(records)
                nbytes += sum(map(len, records))
                bar.update(len(records))
        files.append((count, nbytes))
    return files


def _records(dataset: ClientDataset, client: str, split: str) -> Iterator[bytes]:
    owner = text_feature(_CLIENT_ID, client)
    return (record + owner for record in dataset.records(client, split))


def _write_metadata(manifest: Manifest, splits: dict[str, Sequence[tuple[int, int]]], folder: Path) -> None:
    # Imported late: it imports TensorFlow.
    import tensorflow_datasets as tfds

    features = manifest.features
    types = tfds.features
    if features.x_dtype == "uint8":
        # A list of bytes holds one value, and not one value for each byte.
        x = types.Tensor(shape=features.shape, dtype=np.uint8, encoding=types.Encoding.BYTES)
    else:
        x = types.Tensor(shape=features.shape, dtype=np.float32)
    if not features.num_classes:
        y = types.Scalar(dtype=np.float32)
    elif manifest.class_names is not None:
        y = types.ClassLabel(names=manifest.class_names)
    else:
        y = types.ClassLabel(num_classes=features.num_classes)
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=types.FeaturesDict({_CLIENT_ID: types.Text(), "example_id": types.Text(), "x": x, "y": y}),
        split_infos=[
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[count for count, _ in files],
                num_bytes=sum(nbytes for _, nbytes in files),
                filename_template=tfds.core.ShardedFileTemplate(
                    data_dir=tfds.core.as_path(folder), dataset_name=_NAME, split=split, filetype_suffix="tfrecord"
                ),
            )
            for split, files in splits.items()
        ],
        description=f"Client dataset with {manifest.kept.users} clients and {manifest.kept.examples} examples.",
        supervised_keys=("x", "y"),
        check_data=False,
    )
