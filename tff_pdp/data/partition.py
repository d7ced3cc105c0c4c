"""Ways to divide pooled examples among simulated clients."""

import numpy as np

from tff_pdp.errors import DataError

_MAX_DRAWS = 1000


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


def _draw_owners(
    labels: np.ndarray, num_clients: int, concentration: float, generator: np.random.Generator
) -> np.ndarray:
    owners = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_clients, concentration))
        boundaries = np.floor(np.cumsum(shares) * len(members)).astype(np.int64)
        # The shares sum to 1 only up to rounding, so the last client takes whatever is left.
        owners[members] = np.searchsorted(boundaries[:-1], np.arange(len(members)), side="right")
    return owners
