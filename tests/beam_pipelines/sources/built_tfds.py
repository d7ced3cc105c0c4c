"""Small datasets in the form of TensorFlow Datasets, prepared offline by builders of their own."""

import numpy as np
import tensorflow_datasets as tfds

WRITERS = ("ada", "ben", "cleo")
LETTERS = ("a", "b", "c", "d")


def letter(number):
    """An image whose first pixel is its number, and which is dark but for its first row."""
    image = np.zeros((4, 4, 1), np.uint8)
    image[0] = number
    return image


def portrait(number):
    """An image of one colour, of a size that depends on the number."""
    return np.full((6 + 2 * (number % 2), 6, 3), (number, 200, 255 - number), np.uint8)


class Letters(tfds.core.GeneratorBasedBuilder):
    """Like EMNIST: grey images of letters, and who wrote them; 48 for training, 12 for test."""

    VERSION = tfds.core.Version("1.2.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(4, 4, 1)),
            "label": tfds.features.ClassLabel(names=LETTERS),
            "writer": tfds.features.Text(),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 48), "test": self._generate_examples(48, 60)}

    def _generate_examples(self, start, stop):
        for number in range(start, stop):
            yield number, {"image": letter(number), "label": number % 4, "writer": WRITERS[number // 4 % 3]}


class Portraits(tfds.core.GeneratorBasedBuilder):
    """Like CelebA: photographs of several sizes, truth values about the face, and the number of the person."""

    VERSION = tfds.core.Version("2.0.1")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "attributes": {"Smiling": np.bool_, "Age": np.float32},
            "person": np.int64,
            "landmarks": tfds.features.Tensor(shape=(2,), dtype=np.float32),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(40):
            attributes = {"Smiling": number % 3 == 0, "Age": number / 2}
            landmarks = np.array([number, -number], np.float32)
            person = 7 if number < 24 else 120
            yield (
                number,
                {"image": portrait(number), "attributes": attributes, "person": person, "landmarks": landmarks},
            )


def build(kind, data_dir, file_format="tfrecord"):
    """Prepares a dataset under `data_dir`, and returns the folder of its version."""
    builder = kind(data_dir=str(data_dir), file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(register_checksums=False))
    return builder.data_path
