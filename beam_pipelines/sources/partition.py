"""Divides pooled examples among simulated clients, and writes divided handwritten digits without a download."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from tff_pdp.errors import DataError
from tff_pdp.files import write_atomically

_MAX_DRAWS = 1000
_SHARE_RANGE = (0.4, 0.6)


def dirichlet_partition(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int, min_examples: int = 1
) -> list[np.ndarray]:
    """Divides examples among clients; the clients' shares of each class are drawn from a Dirichlet distribution.

    A small concentration (0.1) gives each client few classes, a large one (100) gives all clients the same mix. Clients
    have different sizes, unlike in `partition_by_class_mixes`. The whole division is drawn again until every client has
    `min_examples` (as in Yurochkin et al., 2019, and NIID-Bench). The same arguments give the same parts.

    Args:
      labels: integer class of each example, `[n]`.
      num_clients: number of parts.
      concentration: the Dirichlet parameter, one value for all clients; above 0.
      seed: seed of the draws.
      min_examples: smallest number of examples of a client.

    Returns:
      For each client the sorted int64 indices of its examples. Every index in `[0, n)` is in exactly one part.

    Raises:
      DataError: in each of 1,000 draws, some client had fewer than `min_examples` examples.
    """
    generator = np.random.default_rng(seed)
    for _ in range(_MAX_DRAWS if num_clients * min_examples <= len(labels) else 0):
        owners = np.zeros(len(labels), np.int64)
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(num_clients, concentration))
            owners[members] = _owners_in_order(len(members), shares)
        if np.bincount(owners, minlength=num_clients).min() >= min_examples:
            return [np.flatnonzero(owners == client) for client in range(num_clients)]
    raise DataError(
        f"{len(labels)} examples could not be divided among {num_clients} clients with at least {min_examples} each at "
        f"concentration {concentration}; raise the concentration, or lower num_clients or min_examples"
    )


def draw_class_shares(
    num_clients: int, num_classes: int, classes_per_client: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws each client's share of each class: every client gets a few classes, in uneven shares.

    Every class goes to the same number of clients. The shares of these clients are drawn from [0.4, 0.6] and divided by
    their sum (Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021). `num_clients *
    classes_per_client` must be a multiple of `num_classes`.

    Returns:
      float64 `[num_clients, num_classes]`; the shares of a class add up to 1.
    """
    remaining = np.full(num_classes, num_clients * classes_per_client // num_classes)
    weights = np.zeros((num_clients, num_classes))
    for client in range(num_clients):
        # Classes with the most places left come first, ties at random: so enough are left for the last client.
        chosen = np.lexsort((generator.random(num_classes), -remaining))[:classes_per_client]
        remaining[chosen] -= 1
        weights[client, chosen] = generator.uniform(*_SHARE_RANGE, size=classes_per_client)
    return weights / weights.sum(axis=0)


def partition_by_shares(labels: np.ndarray, shares: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Divides the examples of each class among clients by given shares, rounded to whole examples.

    Args:
      labels: integer class of each example, `[n]`.
      shares: float64 `[num_clients, num_classes]`, adding up to 1 for each class; 0 for clients without the class.
      generator: draws the examples of each client.

    Returns:
      For each client the sorted int64 indices of its examples. Every index in `[0, n)` is in exactly one part.
    """
    owners = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        owners[members] = _owners_of_class(len(members), shares[:, label])
    return [np.flatnonzero(owners == client) for client in range(len(shares))]


def draw_dirichlet_shares(
    labels: np.ndarray,
    num_clients: int,
    num_classes: int,
    concentration: float,
    min_examples: int,
    generator: np.random.Generator,
) -> np.ndarray | None:
    """Draws each client's share of each class: the shares of a class have a Dirichlet distribution over the clients.

    Clients have different sizes, unlike with `draw_class_mixes`. All shares are drawn again until every client gets
    `min_examples` of the examples, at most 1,000 times (Yurochkin et al., "Bayesian Nonparametric Federated Learning of
    Neural Networks", ICML 2019; Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos: An Experimental
    Study", ICDE 2022).

    Args:
      labels: integer class of each example, `[n]`, in `[0, num_classes)`.
      num_clients: number of clients.
      num_classes: number of classes.
      concentration: the Dirichlet parameter, one value for all clients; above 0.
      min_examples: smallest number of examples that `partition_by_shares` may give to a client.
      generator: draws the shares.

    Returns:
      float64 `[num_clients, num_classes]`; the shares of a class add up to 1. None if in each draw some client had
      fewer than `min_examples` examples.
    """
    counts = np.bincount(labels, minlength=num_classes)
    for _ in range(_MAX_DRAWS if num_clients * min_examples <= len(labels) else 0):
        shares = generator.dirichlet(np.full(num_clients, concentration), size=num_classes).T
        owners = [_owners_of_class(count, shares[:, label]) for label, count in enumerate(counts)]
        if np.bincount(np.concatenate(owners), minlength=num_clients).min() >= min_examples:
            return shares
    return None


def partition_by_shards(labels: np.ndarray, deal: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Cuts examples, sorted by class, into shards of equal size, and gives each client the shards dealt to the client.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017
    ("pathological non-IID"): with two shards each, most clients have examples of two classes.

    Args:
      labels: integer class of each example, `[n]`.
      deal: numbers of each client's shards, int64 `[num_clients, shards_per_client]`: a permutation of all shards.
      generator: shuffles the examples of each class before the cut.

    Returns:
      For each client the sorted int64 indices of its examples. Every index in `[0, n)` is in exactly one part. Shards
      differ by one example at most.
    """
    shuffled = generator.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # Cut in proportion: where classes have equal size and shards suit them, no shard has two classes.
    shards = np.split(ordered, np.arange(1, deal.size) * len(labels) // deal.size)
    return [np.sort(np.concatenate([shards[shard] for shard in own])) for own in deal]


def draw_class_mixes(
    num_clients: int, num_classes: int, concentration: float, generator: np.random.Generator
) -> np.ndarray:
    """Draws each client's mix of classes from a Dirichlet distribution with the same concentration for every class.

    Source: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019: q ~ Dir(alpha p), here with p = 1 for each class. If p is read as probabilities that add up
    to 1, alpha is `concentration * num_classes`. The concentration is above 0. A small concentration (0.1) gives each
    client few classes, a large one (100) gives all clients the same mix.

    Returns:
      float64 `[num_clients, num_classes]`; the mix of a client adds up to 1.
    """
    return generator.dirichlet(np.full(num_classes, concentration), size=num_clients)


def partition_by_class_mixes(labels: np.ndarray, mixes: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Divides examples evenly among clients; each client draws examples, without replacement, by its mix of classes.

    A client draws the class of each of its examples; a draw of a class that is used up is repeated (Hsu et al., 2019).
    The last clients get the remaining examples, so their mixes may differ much from `mixes`.

    Args:
      labels: integer class of each example, `[n]`.
      mixes: float64 `[num_clients, num_classes]`, adding up to 1 for each client; see `draw_class_mixes`.
      generator: draws classes and examples.

    Returns:
      For each client the sorted int64 indices of its examples, `n / num_clients` rounded up or down. Every index in
      `[0, n)` is in exactly one part.
    """
    num_clients, num_classes = mixes.shape
    members = [generator.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
    used = np.zeros(num_classes, np.int64)
    left = np.bincount(labels, minlength=num_classes)
    parts = []
    for size, mix in zip(_even_sizes(len(labels), num_clients), mixes, strict=True):
        counts = _draw_class_counts(size, mix, left, generator)
        chosen = [members[label][used[label] : used[label] + count] for label, count in enumerate(counts)]
        parts.append(np.sort(np.concatenate(chosen)))
        used, left = used + counts, left - counts
    return parts


def uniform_partition(num_examples: int, num_clients: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Divides examples evenly and at random; returns for each client the sorted int64 indices of its examples."""
    cuts = np.cumsum(_even_sizes(num_examples, num_clients))[:-1]
    return [np.sort(part) for part in np.split(generator.permutation(num_examples), cuts)]


def _draw_class_counts(size: int, mix: np.ndarray, left: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draws how many examples of each class one client gets, at most those `left`: int64 `[num_classes]`."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        # All draws are made at once, and failed draws are repeated: the same distribution as draws one by one.
        weights = np.where(counts < left, mix, 0.0)
        if not weights.sum() > 0:
            # All classes of the mix are used up.
            weights = left - counts
        counts = np.minimum(counts + generator.multinomial(missing, weights / weights.sum()), left)
    return counts


def _even_sizes(num_examples: int, num_clients: int) -> np.ndarray:
    """Returns sizes that differ by one at most, the larger ones first: int64 `[num_clients]`."""
    smaller, larger_ones = divmod(num_examples, num_clients)
    return np.where(np.arange(num_clients) < larger_ones, smaller + 1, smaller)


def _owners_of_class(count: int, shares: np.ndarray) -> np.ndarray:
    """Assigns the `count` examples of one class to the clients with a share: int64 `[count]`, in increasing order."""
    clients = np.flatnonzero(shares)
    return clients[_owners_in_order(count, shares[clients])]


def _owners_in_order(count: int, shares: np.ndarray) -> np.ndarray:
    """Assigns `count` examples to owners by shares, in the order of the owners."""
    boundaries = np.floor(np.cumsum(shares) * count).astype(np.int64)
    # The shares sum to 1 only up to rounding, so the last client takes the rest.
    return np.searchsorted(boundaries[:-1], np.arange(count), side="right")


_MAX_INTENSITY = 16.0


def write_digits_leaf(
    folder: str | os.PathLike[str], num_clients: int, concentration: float, seed: int, min_examples: int = 10
) -> Path:
    """Writes scikit-learn's 1,797 real 8x8 digits, divided among silos, as a LEAF JSON file.

    Prepare the folder with `input_shape=(8, 8, 1)` and `num_classes=10`. Pixels are scaled to [0, 1], ink bright. The
    silos are `silo_00`, `silo_01`, ..., divided by `dirichlet_partition`; the same arguments give the same bytes.

    Returns:
      The written file, `folder/all_data_0.json.gz`; a missing folder is made.

    Raises:
      DataError: the examples cannot be divided as requested.
    """
    images, labels = load_digits(return_X_y=True)
    pixels = np.asarray(images) / _MAX_INTENSITY
    labels = np.asarray(labels)
    parts = dirichlet_partition(labels, num_clients, concentration, seed, min_examples)
    user_data = {
        f"silo_{silo:02d}": {"x": pixels[indices].tolist(), "y": labels[indices].tolist()}
        for silo, indices in enumerate(parts)
    }
    leaf = {"users": list(user_data), "num_samples": [len(part) for part in parts], "user_data": user_data}
    path = Path(folder) / "all_data_0.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed time stamp: gzip would otherwise put the hour of writing into the bytes. The level is that of the program
    # `gzip`: Python's default, the highest, takes several times as long for a few percent.
    write_atomically(path, [gzip.compress(json.dumps(leaf).encode("utf-8"), compresslevel=6, mtime=0)])
    return path
