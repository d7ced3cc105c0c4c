"""What reports call the clients: silos, or users."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ClientWords:
    """The words for one kind of client.

    Attributes:
      one: a client.
      many: several of them.
      protected: what a guarantee is about.
      spender: whose epsilon stands for all of them.
    """

    one: str
    many: str
    protected: str
    spender: str


SILOS = ClientWords("silo", "silos", protected="records", spender="the silo that spent most")
USERS = ClientWords("user", "users", protected="users", spender="every user")
