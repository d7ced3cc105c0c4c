"""What reports call the clients: silos, or users."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ClientWords:
    """The words for one kind of client.

    Attributes:
      one: a client.
      many: several of them.
      spender: whose epsilon stands for all of them.
    """

    one: str
    many: str
    spender: str


SILOS = ClientWords("silo", "silos", spender="the silo that spent most")
USERS = ClientWords("user", "users", spender="every user")
