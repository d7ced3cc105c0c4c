"""Small files in the formats of MNIST, EMNIST, CIFAR-10 and CIFAR-100."""

import gzip
import pickle
import struct

import numpy as np


def write_idx(path, array, dtype=np.uint8):
    """Writes unsigned bytes, or, with dtype ">i4", 32-bit integers."""
    code = 8 if dtype == np.uint8 else 12
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(dtype).tobytes(), mtime=0))


def write_mnist(folder, train, test, size=4):
    """Writes `train` and `test` images of `size` x `size` pixels, each image filled with its number modulo 200."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count)
        images = np.broadcast_to((numbers % 200)[:, np.newaxis, np.newaxis], (count, size, size))
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", numbers % 10)
    return folder


def write_writers(path, labels, writers):
    """Writes QMNIST's table of labels and writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = np.zeros((len(labels), 8), np.int64)
    table[:, 0], table[:, 2] = labels, writers
    write_idx(path, table, dtype=">i4")
    return path


def write_emnist(folder, split, images, labels):
    """Writes a split whose train and test side are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("train", "test"):
        write_idx(folder / f"emnist-{split}-{side}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"emnist-{split}-{side}-labels-idx1-ubyte.gz", labels)
    return folder


def cifar10_batch(seed, count):
    """A batch as CIFAR-10 has it, and its images uint8 `[count, 32, 32, 3]`."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)
    rows = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(count, 3072)
    return {b"data": rows, b"labels": [number % 10 for number in range(count)]}, images


def write_cifar10(folder, train=(40, 60), test=30):
    """Writes batches of these sizes and returns the folder and the train and test images."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    sizes = {"test_batch": test, "data_batch_1": train[0], "data_batch_2": train[1]}
    for seed, (name, count) in enumerate(sizes.items()):
        batch, pixels = cifar10_batch(seed, count)
        # Protocol 2 writes bytes as the official archive's re-packed copies do.
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        images.append(pixels)
    return folder, np.concatenate(images[1:]), images[0]


def write_cifar100(folder, train=200, test=100):
    """Writes both files, with fine labels 0, 1, ..., 99 in turn, and returns the folder and the images."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for seed, (name, count) in enumerate({"train": train, "test": test}.items()):
        batch, pixels = cifar10_batch(seed, count)
        numbers = np.arange(count) % 100
        labels = {b"fine_labels": numbers.tolist(), b"coarse_labels": (numbers // 5).tolist()}
        batch = {b"data": batch[b"data"], **labels, b"filenames": [b"an_image.png"] * count}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        images.append(pixels)
    return folder, *images
