"""Small files in the formats of MNIST and CIFAR-10."""

import gzip
import pickle
import struct

import numpy as np


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0))


def write_mnist(folder, train, test, size=4):
    """Writes `train` and `test` images of `size` x `size` pixels, each image filled with its number modulo 200."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count)
        images = np.broadcast_to((numbers % 200)[:, np.newaxis, np.newaxis], (count, size, size))
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", numbers % 10)
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
