"""Ways to divide pooled examples among simulated clients."""

import numpy as np

from tff_pdp.errors import DataError

_MAX_DRAWS = 1000
_SHARE_RANGE = (0.4, 0.6)


def dirichlet_partition(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int, min_examples: int = 1
) -> list[np.ndarray]:
    """Divides examples among clients whose label mixes differ: for each class, client shares ~ Dirichlet.

    A small concentration (0.1) gives each client few classes, a large one (100) gives all the same mix. The whole
    division is drawn again until every client has `min_examples` (as Yurochkin et al., 2019, and NIID-Bench do).

    Args:
      labels: integer class of each example, `[n]`.
      num_clients: number of parts.
      concentration: the Dirichlet parameter, one value for all clients; above 0.
      seed: the same arguments and seed give the same parts.
      min_examples: the fewest examples a client may hold.

    Returns:
      For each client the sorted int64 indices of its examples. Every index in `[0, n)` is in exactly one of them.

    Raises:
      DataError: an argument is out of range, or 1,000 draws left some client short of `min_examples`.
    """
    if num_clients < 1 or not concentration > 0 or min_examples < 0:
        raise DataError(
            f"dirichlet_partition needs num_clients >= 1, concentration > 0 and min_examples >= 0; "
            f"got {num_clients}, {concentration} and {min_examples}"
        )
    generator = np.random.default_rng(seed)
    for _ in range(_MAX_DRAWS if num_clients * min_examples <= len(labels) else 0):
        owners = _draw_owners(labels, num_clients, concentration, generator)
        if np.bincount(owners, minlength=num_clients).min() >= min_examples:
            return [np.flatnonzero(owners == client) for client in range(num_clients)]
    raise DataError(
        f"{len(labels)} examples could not be divided among {num_clients} clients with at least {min_examples} each at "
        f"concentration {concentration}; raise the concentration, or lower num_clients or min_examples"
    )


def draw_class_shares(
    num_clients: int, num_classes: int, classes_per_client: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws how much of each class each client gets: a few classes each, in uneven shares.

    Every class goes to equally many clients, whose shares are drawn from [0.4, 0.6] and divided by their sum (Shamsian
    et al., "Personalized Federated Learning using Hypernetworks", ICML 2021).

    Args:
      num_clients: number of clients; times `classes_per_client`, a multiple of `num_classes`.
      num_classes: number of classes.
      classes_per_client: how many different classes each client gets, at most `num_classes`.
      generator: draws classes and shares.

    Returns:
      float64 `[num_clients, num_classes]`; the shares of a class add up to 1.

    Raises:
      DataError: an argument is out of range.
    """
    if num_clients < 1 or not 1 <= classes_per_client <= num_classes or num_clients * classes_per_client % num_classes:
        raise DataError(
            f"{num_clients} clients with {classes_per_client} of {num_classes} classes each: the classes cannot be "
            f"equally frequent; make the product of the first two a multiple of {num_classes}"
        )
    remaining = np.full(num_classes, num_clients * classes_per_client // num_classes)
    weights = np.zeros((num_clients, num_classes))
    for client in range(num_clients):
        # The classes that most clients are still to get, at random among equals: so the last client finds enough.
        chosen = np.lexsort((generator.random(num_classes), -remaining))[:classes_per_client]
        remaining[chosen] -= 1
        weights[client, chosen] = generator.uniform(*_SHARE_RANGE, size=classes_per_client)
    return weights / weights.sum(axis=0)


def partition_by_shares(labels: np.ndarray, shares: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Divides examples among clients, each class in the shares given, up to whole examples.

    Args:
      labels: integer class of each example, `[n]`.
      shares: float64 `[num_clients, num_classes]`, adding up to 1 for each class; 0 for clients without the class.
      generator: draws who gets which examples of a class.

    Returns:
      For each client the sorted int64 indices of its examples. Every index in `[0, n)` is in exactly one of them.
    """
    owners = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        clients = np.flatnonzero(shares[:, label])
        owners[members] = clients[_owners_in_order(len(members), shares[clients, label])]
    return [np.flatnonzero(owners == client) for client in range(len(shares))]


def _draw_owners(
    labels: np.ndarray, num_clients: int, concentration: float, generator: np.random.Generator
) -> np.ndarray:
    owners = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_clients, concentration))
        owners[members] = _owners_in_order(len(members), shares)
    return owners


def _owners_in_order(count: int, shares: np.ndarray) -> np.ndarray:
    """The owner of each of `count` examples, the first owner's coming first."""
    boundaries = np.floor(np.cumsum(shares) * count).astype(np.int64)
    # The shares sum to 1 only up to rounding, so the last client takes whatever is left.
    return np.searchsorted(boundaries[:-1], np.arange(count), side="right")
