"""How workers find the methods of the contract tests: by the names of a method and of a computation."""

import dataclasses
import os

# A worker imports this module with its first request for a method.
SETTING = "TF_SETTING_OF_THE_HEAD"
SETTING_AT_IMPORT = os.environ.get(SETTING)


def setting_at_import():
    """The value that a setting of the head's libraries had when this process imported this module."""
    return SETTING_AT_IMPORT


class ContractHost:
    """Builds methods at a worker. An address is a name of a method and a name of a computation."""

    def knows(self, key):
        raise AssertionError(f"no setup is needed, and one was asked for: {key}")

    def computation(self, address):
        from tests.contract.contract_support import build

        method, name = address
        return getattr(build(method)[1], name)


class ContractDirectory:
    """Names, in the head's process, the computations of the methods that have been entered."""

    def __init__(self):
        self._entered = {}

    def enter(self, method, process):
        """Enters the computations of a method, which `contract_support.build` keeps."""
        for name in (field.name for field in dataclasses.fields(process)):
            if (computation := getattr(process, name)) is not None:
                self._entered[id(computation)] = (method, name)

    def address_of(self, computation):
        return self._entered.get(id(computation))

    def setup(self, key):
        raise AssertionError(f"no setup is needed, and one was asked for: {key}")
