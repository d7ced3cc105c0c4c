"""Builds and starts engines by name; most callers use `running_engine(name)`."""

import contextlib
import pkgutil
from collections.abc import Iterator

from tff_pdp.engines.base import Engine
from tff_pdp.errors import ConfigError

__all__ = ["ENGINES", "Engine", "build_engine", "running_engine"]

# Imported on use: an engine brings TensorFlow and TFF with it, which take seconds to import.
ENGINES = {
    "inprocess": "tff_pdp.engines.inprocess.engine:InProcessEngine",
    "ray": "tff_pdp.engines.ray_workers.engine:RayEngine",
    "native": "tff_pdp.engines.native:NativeEngine",
}


def build_engine(name: str = "inprocess", device: str = "auto", **options: object) -> Engine:
    """Builds and starts an engine.

    Args:
        name: One of `ENGINES`.
        device: Device that the engine computes on. An absent device is an error; no other device is used instead.
        **options: Further arguments of the engine's class.

    Returns:
        The engine, running. Use it as `with build_engine("native").install(): ...`.

    Raises:
        ConfigError: If no engine has this name.
        EngineError: If the engine cannot use the device, or does not start.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine: unknown name {name!r}; known engines: {', '.join(sorted(ENGINES))}.")
    return pkgutil.resolve_name(ENGINES[name])(device=device, **options)


@contextlib.contextmanager
def running_engine(name: str = "inprocess", device: str = "auto", **options: object) -> Iterator[Engine]:
    """Builds an engine, installs it in this thread, and closes it at the end of the `with` block.

    Raises:
        ConfigError, EngineError: As in `build_engine`.
    """
    with contextlib.closing(build_engine(name, device, **options)) as engine, engine.install():
        yield engine
