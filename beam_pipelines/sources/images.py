"""Reads and hashes image files, defines data sets of labelled train and test images, and shrinks images."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from beam_pipelines.records import Reason, Unusable
from tff_pdp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image

# Number of threads: reading small files mostly waits for the disk or the network.
_READERS = 16
_FILES_PER_BATCH = 256


def read_image(
    folder: Path, name: str, *, file_format: str, shape: tuple[int, ...], resampling: str, must_be_square: bool = False
) -> np.ndarray | Unusable:
    """Decodes one image and resizes it.

    Args:
      folder: folder of the image; not in messages, because workers may see the folder under different names.
      name: name of the file in the folder.
      file_format: Pillow's name of the only accepted format, such as `JPEG` or `PNG`.
      shape: height, width and channels (3 for colours, 1 for grey) of the result.
      resampling: Pillow's name of the method: `BOX` averages over the area that becomes a pixel, `LANCZOS` is sharper.
      must_be_square: whether images that are not square are unusable.

    Returns:
      The pixels, float32 `[height * width * channels]` in [0, 1], or the reason why the file is unusable.
    """
    # Imported late: the check of the settings needs no images.
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(folder / name, formats=[file_format]) as image:
            if must_be_square and image.width != image.height:
                return _unusable(name, f"{image.width} x {image.height} pixels, not a square")
            converted = _converted(image, shape, resampling)
    except FileNotFoundError:
        return _unusable(name, "no such file")
    # The error's own text contains the folder.
    except UnidentifiedImageError:
        return _unusable(name, f"not a {file_format} image")
    # Pillow's other errors for files that are cut short, damaged or forged.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return _unusable(name, f"damaged: {error}")
    return np.asarray(converted, np.float32).ravel() / np.float32(255)


def resized(image: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Resizes one image: each pixel of the result is the average of an area. Colours become grey, or grey colours.

    Args:
      image: uint8 `[height, width, channels]`, with 1 or 3 channels.
      shape: height, width and channels (3 for colours, 1 for grey) of the result.

    Returns:
      uint8 of this shape; the image itself if the shape is equal.

    Raises:
      DataError: the image has another number of channels.
    """
    from PIL import Image

    if image.shape == shape:
        return image
    if image.shape[2] not in (1, 3):
        raise DataError(f"an image of shape {list(image.shape)} cannot be resized; needed are 1 or 3 channels")
    pixels = np.ascontiguousarray(image if image.shape[2] == 3 else image[..., 0])
    return np.asarray(_converted(Image.fromarray(pixels), shape, "BOX")).reshape(shape)


def _converted(image: "Image.Image", shape: tuple[int, ...], resampling: str) -> "Image.Image":
    """Converts an image to colours or grey, and resizes the image to height and width."""
    from PIL import Image

    height, width, channels = shape
    return image.convert("RGB" if channels == 3 else "L").resize((width, height), Image.Resampling[resampling])


def hash_images(folder: Path, names: Iterable[str]) -> str:
    """Hashes the names and contents of files with SHA-256 (only the name of a missing file); shows a progress bar."""
    everyone = list(names)
    batches = [everyone[start : start + _FILES_PER_BATCH] for start in range(0, len(everyone), _FILES_PER_BATCH)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as readers, tqdm(desc="hash images", total=len(everyone), unit="image") as bar:
        for lines in readers.map(lambda batch: [f"{name} {_hash_file(folder / name)}\n" for name in batch], batches):
            digest.update("".join(lines).encode())
            bar.update(len(lines))
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def _unusable(name: str, problem: str) -> Unusable:
    return Unusable(Reason.UNREADABLE_IMAGE, f"{name}: {problem}")


@dataclasses.dataclass(frozen=True)
class Images:
    """Labelled images: `x` uint8 `[n, height, width, channels]`, `y` int64 `[n]`.

    A source of numbers gives `x` as float32 `[n, ...]`, and a regression has `y` as float32 `[n]`.
    """

    x: np.ndarray
    y: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> "Images":
        """Returns the images at these positions, int64 `[m]`."""
        return Images(self.x[chosen], self.y[chosen])


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Published train and test images with labels in `[0, num_classes)`; `origin` lists the files as JSON values."""

    train: Images
    test: Images
    num_classes: int
    origin: Sequence[Any]


def shrunk(images: np.ndarray, factor: int) -> np.ndarray:
    """Shrinks images: each square of `factor * factor` pixels becomes one pixel, the rounded mean.

    Args:
      images: uint8 `[n, height, width, channels]`.
      factor: side of a square in pixels; must divide height and width. With 1, `images` may be any array.

    Returns:
      uint8 `[n, height / factor, width / factor, channels]`.
    """
    if factor == 1:
        return images
    number, height, width, channels = images.shape
    squares = images.reshape(number, height // factor, factor, width // factor, factor, channels)
    return np.rint(squares.mean(axis=(2, 4))).astype(np.uint8)


def shrunken_shape(shape: tuple[int, ...], factor: int) -> tuple[int, int, int]:
    """Returns the shape `(height, width, channels)` that images have after `shrunk`.

    Raises:
      ConfigError: the factor (1 or more) does not divide the height or the width.
    """
    height, width, channels = shape
    if height % factor or width % factor:
        raise ConfigError(f"data.shrink {factor} does not divide images of {height} x {width} pixels")
    return height // factor, width // factor, channels
