"""Generates LEAF FEMNIST JSON of the true size; as a program, runs the job on it once and prints the counts.

The data have 3,400 writers, 800,000 images, and 100 writers per file: some 4 GB of text.

python -m benchmarks.preparing.femnist INPUT OUTPUT
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import ClientDatasetOptions
from beam_pipelines.sources.leaf import Leaf

NUM_WRITERS, NUM_IMAGES, WRITERS_PER_FILE, NUM_CLASSES = 3_400, 800_000, 100, 62
_SIDE = 28
# Pixels as LEAF writes them: bytes divided by 255.
_PIXELS = np.array([json.dumps(value / 255).encode() for value in range(256)], object)


def write_leaf_files(folder: Path, num_writers: int = NUM_WRITERS, num_images: int = NUM_IMAGES, seed: int = 0) -> None:
    """Writes the files, unless they exist: dark strokes on white, most values 1.0, as in LEAF's files."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = np.full(num_writers, num_images // num_writers)
    sizes[: num_images % num_writers] += 1
    starts = range(0, num_writers, WRITERS_PER_FILE)
    for number, start in enumerate(tqdm(starts, desc="write LEAF files", unit="file")):
        path = folder / f"all_data_{number}.json"
        if path.exists():
            continue
        writers = range(start, min(start + WRITERS_PER_FILE, num_writers))
        generator = np.random.default_rng([seed, number])
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            names = [f"f{writer:04d}_{writer % 50:02d}" for writer in writers]
            counts = [int(sizes[writer]) for writer in writers]
            head = json.dumps({"users": names, "num_samples": counts}).encode()
            file.write(head[:-1] + b', "user_data": {')
            for place, (name, count) in enumerate(zip(names, counts, strict=True)):
                file.write(b", " * (place > 0) + json.dumps(name).encode() + b': {"x": [')
                file.write(b", ".join(_images(generator, count)))
                labels = generator.integers(0, NUM_CLASSES, count).tolist()
                file.write(b'], "y": ' + json.dumps(labels).encode() + b"}")
            file.write(b"}}")
        unfinished.rename(path)


def _images(generator: np.random.Generator, count: int) -> Iterator[bytes]:
    """Yields images as JSON: a blurred stroke from one random place to another."""
    rows, columns = np.mgrid[:_SIDE, :_SIDE]
    for ends in generator.uniform(4, _SIDE - 4, (count, 4)):
        steps = np.linspace(0, 1, 12)
        across = np.subtract.outer(rows.ravel(), ends[0] + steps * (ends[2] - ends[0]))
        along = np.subtract.outer(columns.ravel(), ends[1] + steps * (ends[3] - ends[1]))
        ink = np.exp(-(across**2 + along**2).min(axis=1) / 2)
        values = np.where(ink > 0.05, 255 - (ink * 255).astype(int), 255)
        yield b"[" + b", ".join(_PIXELS[values]) + b"]"


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    job = ClientDatasetOptions(
        options.input, options.output, input_shape=(_SIDE, _SIDE, 1), num_classes=NUM_CLASSES, num_shards=16
    )
    raw = Leaf(kind="leaf", input=str(options.input)).build(options.output)
    summary = run_client_dataset_job(raw, job)
    print(json.dumps({"output_rows": sum(summary.manifest.num_examples.values())}))


if __name__ == "__main__":
    main()
