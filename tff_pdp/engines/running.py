"""Engines: how a TFF computation is executed. `running_engine(name)` is the way in."""

import contextlib
from collections.abc import Callable, Iterator

from tff_pdp.engines.base import Engine
from tff_pdp.errors import ConfigError

__all__ = ["ENGINES", "Engine", "build_engine", "running_engine"]


def _build_native(device: str, **options: object) -> Engine:
    # Imported on use: an engine brings TensorFlow and TFF with it, which take seconds to import.
    from tff_pdp.engines.native import build_native_engine

    return build_native_engine(device=device, **options)  # type: ignore[arg-type]


def _build_inprocess(device: str, **options: object) -> Engine:
    from tff_pdp.engines.inprocess.engine import build_inprocess_engine

    return build_inprocess_engine(device=device, **options)  # type: ignore[arg-type]


ENGINES: dict[str, Callable[..., Engine]] = {
    "inprocess": _build_inprocess,
    "native": _build_native,
}


def build_engine(name: str = "inprocess", device: str = "auto", **options: object) -> Engine:
    """Builds and starts an engine.

    Args:
        name: One of `ENGINES`.
        device: Where the engine computes; a device that is absent is refused, never replaced.
        **options: Passed to the engine's own builder.

    Returns:
        The engine, running. Use it as `with build_engine("native").install(): ...`.

    Raises:
        ConfigError: If no engine has this name.
        EngineError: If the engine cannot use the device, or does not start.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine: unknown name {name!r}; known engines: {', '.join(sorted(ENGINES))}.")
    return ENGINES[name](device=device, **options)


@contextlib.contextmanager
def running_engine(name: str = "inprocess", device: str = "auto", **options: object) -> Iterator[Engine]:
    """Builds an engine, installs it in this thread, and closes it at the end of the `with` block.

    Raises:
        ConfigError, EngineError: As `build_engine`.
    """
    with contextlib.closing(build_engine(name, device, **options)) as engine, engine.install():
        yield engine
