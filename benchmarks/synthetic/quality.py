"""Measures models that are trained on synthetic images alone, by their accuracy on real test images.

A generator makes 10,000 synthetic images from records of MNIST or Fashion-MNIST, with 14 x 14 pixels. A CNN and a
softmax regression are trained on these images for ten epochs; the accuracy is that after the last epoch, on the 10,000
real test images, from which nothing is chosen. The reference is trained on 10,000 real images. Keys are no secrets
here, so that results can be repeated: synthetic images of this command are not protected.

Results are merged into those of earlier calls, so that parts can be run one after another.

  python -m benchmarks.synthetic.quality --data data/mnist
  python -m benchmarks.synthetic.quality --data /usr/share/datasets/fashion-mnist --dataset fashion_mnist \
      --generators dp_gaussian --columns 6000:10,6000:1
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beam_pipelines.sources.images import ImageDataset, shrunk
from beam_pipelines.sources.mnist import MNIST_CLASSES, read_fashion_mnist, read_mnist
from benchmarks.machine import RESULTS, describe_machine
from tff_pdp.errors import UserError
from tff_pdp.files import replace_text
from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_linear
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import GENERATORS
from tff_pdp.privacy.synthetic.release import plan_release
from tff_pdp.settings import read_settings

OUTPUT = RESULTS / "synthetic_quality.json"
READERS: dict[str, Callable[[Path], ImageDataset]] = {"mnist": read_mnist, "fashion_mnist": read_fashion_mnist}
# Public settings of each generator, by data set. None was chosen by test images.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "dp_gaussian": {"mnist": {"radius": 3.5}, "fashion_mnist": {"radius": 8.0}},
    "dp_merf": {"mnist": {"length_scale": 4.0}, "fashion_mnist": {}},
    # Their defaults suit some 6,000 records.
    "dp_cgan": {"mnist": {}, "fashion_mnist": {}},
    "datalens": {"mnist": {}, "fashion_mnist": {}},
}
# Name of the reference among generators.
REAL = "real"
SYNTHETIC_IMAGES = 10_000
SHRINK, SIDE = 2, 14
DELTA = 1e-5
EPOCHS, BATCH_SIZE, LEARNING_RATE = 10, 64, 1e-3
MODELS: dict[str, Callable[[], Model]] = {
    "cnn": lambda: build_cnn((SIDE, SIDE, 1), MNIST_CLASSES, (16, 32), 3, 64, pool_after="each", padding="same"),
    "softmax": lambda: build_linear((SIDE, SIDE, 1), MNIST_CLASSES),
}


class Examples(NamedTuple):
    """Labelled images.

    Attributes:
      x: float64 `[n, 14, 14, 1]`, between 0 and 1.
      y: classes, int64 `[n]`.
    """

    x: np.ndarray
    y: np.ndarray


class Column(NamedTuple):
    """One size of a silo and one budget.

    Attributes:
      records: number of records from which synthetic images are made.
      epsilon: budget, at delta 1e-5.
    """

    records: int
    epsilon: float

    def __str__(self) -> str:
        """Returns the column as the command line has it."""
        return f"{self.records}:{self.epsilon:g}"


COLUMNS = (Column(60_000, 10), Column(60_000, 1), Column(6000, 10), Column(6000, 1), Column(2000, 2))
Row = dict[str, Any]


def read_images(dataset: str, folder: Path) -> tuple[Examples, Examples]:
    """Reads training and test images, and averages squares of 2 x 2 pixels."""
    both = READERS[dataset](folder)
    train, test = (Examples(shrunk(side.x, SHRINK) / 255, side.y) for side in (both.train, both.test))
    return train, test


def chosen(train: Examples, number: int, seed: int) -> Examples:
    """Draws images without replacement."""
    places = np.random.default_rng(seed).permutation(len(train.x))[:number]
    return Examples(train.x[places], train.y[places])


def measure(name: str, dataset: str, column: Column, seed: int, train: Examples, test: Examples) -> Row:
    """Makes synthetic images from drawn records, and trains models on them; returns a row of the results.

    A generator that refuses a budget or a number of records has the message in place of accuracies.
    """
    row: Row = {"dataset": dataset, "generator": name, **column._asdict(), "delta": DELTA, "seed": seed}
    records = chosen(train, column.records, seed)
    content = {"kind": name, "examples": SYNTHETIC_IMAGES, "num_classes": MNIST_CLASSES, **SETTINGS[name][dataset]}
    generator = read_settings(GENERATORS.find(name), content, "benchmarks")
    try:
        planned = plan_release(generator, column.epsilon, DELTA)
        started, cpu_started = time.perf_counter(), time.process_time()
        draws = ExactDraws(f"synthetic quality, no secret: {seed}".encode())
        made = generator.fit(records.x, records.y, planned.noise_multiplier, draws)
    except UserError as error:
        return {**row, "refused": str(error)}
    row |= {"fit_s": time.perf_counter() - started, "fit_cpu_s": time.process_time() - cpu_started}
    found = accuracies(Examples(made.x, made.y), test, seed)
    return {**row, "noise_multiplier": planned.noise_multiplier, **found}


def measure_real(dataset: str, seed: int, train: Examples, test: Examples) -> Row:
    """Trains models on as many real images; returns a row of the results."""
    row = {"dataset": dataset, "generator": REAL, "records": SYNTHETIC_IMAGES, "epsilon": None, "seed": seed}
    return {**row, **accuracies(chosen(train, SYNTHETIC_IMAGES, seed), test, seed)}


def accuracies(train: Examples, test: Examples, seed: int) -> dict[str, float]:
    """Trains every model; returns its accuracy on test images after the last epoch."""
    return {name: accuracy(name, train, test, seed) for name in MODELS}


def accuracy(name: str, train: Examples, test: Examples, seed: int) -> float:
    """Trains one model by Adam; returns its accuracy on test images after the last epoch."""
    # After tff_pdp, which sets up how TensorFlow computes.
    import tensorflow as tf

    model = MODELS[name]()
    weights = {key: tf.Variable(tf.constant(value)) for key, value in model.init(seed).items()}
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(list(weights.values()))

    @tf.function
    def epoch(x: tf.Tensor, y: tf.Tensor, order: tf.Tensor) -> None:
        for first in tf.range(0, len(train.x), BATCH_SIZE):
            batch = order[first : first + BATCH_SIZE]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model.loss(weights, tf.gather(x, batch), tf.gather(y, batch)))
            variables = list(weights.values())
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    orders = np.random.default_rng(seed)
    x, y = tf.constant(train.x, tf.float32), tf.constant(train.y)
    for _ in range(EPOCHS):
        epoch(x, y, tf.constant(orders.permutation(len(train.x))))
    found = tf.argmax(model.predict(weights, tf.constant(test.x, tf.float32)), axis=1)
    return float(np.mean(np.asarray(found) == test.y))


def merged(rows: Sequence[Row], added: Sequence[Row]) -> list[Row]:
    """Returns all rows; an added row replaces the row of the same measurement."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("dataset", "generator", "records", "epsilon", "seed"))

    return list({key(row): row for row in [*rows, *added]}.values())


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table for each data set: means over seeds in %, CNN / softmax regression, and times of fits.

    Times are those of the processor, which other work on the machine changes little.
    """
    parts = []
    for dataset in READERS:
        own = [row for row in rows if row["dataset"] == dataset]
        if own:
            parts += [f"{dataset}:", *_lines(own), ""]
    return "\n".join(parts)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "| generator | " + " | ".join(f"n={c.records}, ε={c.epsilon:g}" for c in COLUMNS) + " | CPU seconds |"
    yield "| --- |" + " --- |" * (len(COLUMNS) + 1)
    for name in sorted({row["generator"] for row in rows} - {REAL}):
        own = [row for row in rows if row["generator"] == name]
        cells = [_cell([row for row in own if Column(row["records"], row["epsilon"]) == column]) for column in COLUMNS]
        seconds = [row["fit_cpu_s"] for row in own if "fit_cpu_s" in row]
        times = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else ""
        yield f"| {name} | {' | '.join(cells)} | {times} |"
    yield f"\n{SYNTHETIC_IMAGES:,} real images: {_cell([row for row in rows if row['generator'] == REAL])}"


def _cell(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if "refused" not in row]
    if not measured:
        return "refused" if rows else ""
    return " / ".join(f"{100 * statistics.mean(row[model] for row in measured):.1f}" for model in MODELS)


def main() -> None:
    """Measures all generators, or some, in all columns, or some, and writes the rows after each."""

    def columns(text: str) -> list[Column]:
        pairs = [part.split(":") for part in text.split(",")]
        return [Column(int(records), float(epsilon)) for records, epsilon in pairs]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder of the four .gz files")
    parser.add_argument("--dataset", choices=list(READERS), default="mnist", help="which images these are")
    parser.add_argument(
        "--generators", type=names, default=[REAL, *SETTINGS], help=f"of {','.join([REAL, *SETTINGS])}; default: all"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1; default 3")
    parser.add_argument(
        "--columns", type=columns, default=COLUMNS, help=f"records:epsilon; default {','.join(map(str, COLUMNS))}"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    train, test = read_images(options.dataset, options.data)
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for name in options.generators:
        for column in [None] if name == REAL else options.columns:
            for seed in range(options.seeds):
                if column is None:
                    row = measure_real(options.dataset, seed, train, test)
                else:
                    row = measure(name, options.dataset, column, seed, train, test)
                print(json.dumps(row), flush=True)
                rows = merged(rows, [row])
                found = {"machine": describe_machine(), "rows": rows}
                replace_text(options.output, json.dumps(found, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
