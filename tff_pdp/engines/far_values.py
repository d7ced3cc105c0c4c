"""Describes clients' values that workers make or keep for themselves; only the description crosses to a worker."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tff_pdp.engines.client_values import ClientGroup, ClientValues

Shapes = tuple[tuple[int, ...], ...]


class Recipe(Protocol):
    """The way in which a worker makes or finds clients' values. Recipes are sent to workers, by pickle."""

    @property
    def is_lasting(self) -> bool:
        """True if a worker that has made values for some clients may use the same values in later calls."""
        ...

    def load(self, host: Any, rows: np.ndarray, member_type: Any) -> ClientValues:
        """Makes the values of some clients, at a worker.

        Args:
          host: object that the worker builds once, for all recipes.
          rows: positions of the clients in the recipe's own order, int64 `[clients]`.
          member_type: TFF type of one client's value.
        """
        ...


class FarValues(ClientValues):
    """Values of clients that stay at the workers, in the form of a recipe.

    An engine with workers sends the recipe. Everything else sees an ordinary sequence: reading a member, or passing the
    sequence to an engine without workers, brings the values here.

    Attributes:
      recipe: the way in which a worker makes or finds the values.
      rows: positions of the clients in the recipe's order, int64 `[clients]`.
    """

    def __init__(
        self,
        member_type: Any,
        recipe: Recipe,
        rows: np.ndarray,
        bring: Callable[[np.ndarray], ClientValues],
        shapes: Sequence[Shapes] | None = None,
    ):
        """Describes values.

        Args:
          member_type: TFF type of one client's value.
          recipe: the way in which a worker makes or finds the values.
          rows: positions of the clients in the recipe's order, int64 `[clients]`.
          bring: function that makes the values of the clients at some positions here.
          shapes: for each client, the shapes of the leaves whose type has an unknown dimension; None for none.
        """
        super().__init__(member_type, [])
        self.recipe, self.rows, self._bring = recipe, rows, bring
        self._size = len(rows)
        self._shapes = [()] * len(rows) if shapes is None else list(shapes)

    @property
    def groups(self) -> Sequence[ClientGroup]:
        """Groups of the values, which this call brings here."""
        return self._here.groups

    @functools.cached_property
    def _here(self) -> ClientValues:
        return self._bring(self.rows)

    @property
    def _arrangement(self) -> Any:
        return self._here._arrangement

    @_arrangement.setter
    def _arrangement(self, _: Any) -> None:
        """Does nothing: the values have no arrangement until they are here."""

    @property
    def may_differ_in_shape(self) -> bool:
        """False if all clients' values are known to have equal shapes; brings nothing here."""
        return len(set(self._shapes)) > 1

    def with_type(self, member_type: Any) -> "FarValues":
        """Returns the same values with another type of one client's value; brings nothing here."""
        bring = self._bring
        typed = copy.copy(self)
        typed.__dict__.pop("_here", None)
        typed.__dict__.pop("_to_python", None)
        typed.member_type, typed._bring = member_type, lambda rows: bring(rows).with_type(member_type)
        return typed

    def copy(self) -> ClientValues:
        """Returns the values, brought here, as an object that can be arranged independently of this one."""
        return self._here.copy()

    def keep_like(self, other: ClientValues) -> None:
        """Adopts the groups of `other`, an object that must have the same values."""
        self._here.keep_like(other)

    def shapes(self) -> list[Shapes]:
        """Returns, for every client, the shapes of the leaves whose type has an unknown dimension."""
        return list(self._shapes)

    def select(self, clients: Sequence[int] | np.ndarray) -> "FarValues":
        """Returns the values of the given clients, in the given order; brings nothing here."""
        chosen = np.asarray(clients, np.int64)
        shapes = [self._shapes[place] for place in chosen]
        return FarValues(self.member_type, self.recipe, self.rows[chosen], self._bring, shapes)


class ResultValues(FarValues):
    """Results of a computation that stay at the workers which have computed the clients."""

    def __init__(
        self,
        member_type: Any,
        rows: np.ndarray,
        *,
        bring: Callable[[np.ndarray], ClientValues],
        keep: Callable[[Any], list[np.ndarray]],
    ):
        """Describes results.

        Args:
          member_type: TFF type of one client's value.
          rows: positions of the clients in the computation, int64 `[clients]`.
          bring: function that brings the values of the clients at some positions here.
          keep: function that has all clients' values stored by a writer at the workers; returns, for each part, the
            positions of its clients in the order in which they are stored.
        """
        super().__init__(member_type, _NOT_SENT, rows, bring)
        self.keep = keep

    def select(self, clients: Sequence[int] | np.ndarray) -> ClientValues:
        """Returns the values of the given clients, in the given order, and brings them here."""
        return self._here.select(clients)


class _NotSent:
    """In place of a recipe, for values that no worker can make again without the computation."""

    is_lasting = False

    def load(self, host: Any, rows: np.ndarray, member_type: Any) -> ClientValues:
        raise ValueError("results of a computation are sent by value")


_NOT_SENT = _NotSent()
