"""Settings of reproductions, changed for tests that train."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from tests.tiers import amount
from tff_pdp.reproduce import jobs

# Stacks of clients, as the configurations have them, take four times as long to trace.
PARALLELISM = amount(test="loop", all="vectorized")


@contextlib.contextmanager
def setting_changed(name: str, overrides: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Iterator[None]:
    """Replaces a setting, whose small scale overrides these parts of its configuration too."""
    setting = jobs.SETTINGS[name]
    small = setting.scales["small"]
    overrides = {**small.overrides, "training.client_parallelism": PARALLELISM, **overrides}
    scales = {"small": dataclasses.replace(small, overrides=overrides)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jobs.SETTINGS, name, dataclasses.replace(setting, scales=scales, **changes))
        yield
