"""Settings of reproductions, changed for tests that train."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tiers import amount
from tff_pdp.reproduce import setting as settings

# Stacks of clients, as the configurations have them, take four times as long to trace.
PARALLELISM = amount(test="loop", all="vectorized")


@contextlib.contextmanager
def setting_changed(name: str, overrides: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Iterator[None]:
    """Replaces a setting, whose small scale overrides these parts of its configuration too."""
    read, setting = settings.read_setting, settings.read_setting(name)
    small = setting.scales["small"]
    overrides = {**small.overrides, "training.client_parallelism": PARALLELISM, **overrides}
    scales = {"small": replace(small, overrides=overrides)}
    changed = replace(setting, scales=scales, default_scale="small", **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "read_setting", lambda asked: changed if asked == name else read(asked))
        yield
