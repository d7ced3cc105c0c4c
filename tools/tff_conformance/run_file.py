"""Runs one of TFF's test files in this process, on the in-process engine or on TFF's own context.

    python -m tools.tff_conformance.run_file SOURCE_TREE TEST_FILE ENGINE [options of absltest]

The test file imports TFF from the installed wheel. The wheel leaves out modules that only tests use, and these come
from the source tree.
"""

import importlib.abc
import importlib.machinery
import runpy
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

# TFF's functions that build or install a context, by module; the synchronous one of each module comes first. The others
# have no counterpart in this package, and tests that ask for them are skipped.
_CONTEXTS = {
    "native": ("sync_local_cpp", "async_local_cpp", "mergeable_comp"),
    "test": ("sync_test_cpp", "async_test_cpp"),
}


class SourceTree(importlib.abc.MetaPathFinder):
    """Finds the modules of TFF that the installed wheel lacks in a source tree."""

    def __init__(self, root: Path):
        self._root = root

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> Any:
        """Finds a module in the source tree; None for modules outside of TFF."""
        package, _, _ = fullname.rpartition(".")
        if not package.startswith("tensorflow_federated"):
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(self._root.joinpath(*package.split(".")))])


def main(root: Path, file: str, engine: str, options: list[str]) -> None:
    """Runs the file as a program, which ends this process with the status of the tests."""
    sys.meta_path.append(SourceTree(root))
    if engine != "stock":
        _replace_contexts(as_numpy=engine == "inprocess-numpy")
    sys.argv = [file, *options]
    runpy.run_path(str(root / file), run_name="__main__")


def _replace_contexts(*, as_numpy: bool) -> None:
    """Makes TFF's functions for synchronous contexts build and install engines of this package."""
    import tensorflow as tf
    import tree

    from tff_pdp import _tff
    from tff_pdp.engines.client_values import ClientValues
    from tff_pdp.engines.inprocess.engine import InProcessEngine

    def converted(value: Any) -> Any:
        if isinstance(value, ClientValues):
            return list(value)
        if isinstance(value, _tff.Struct):
            return _tff.Struct([(name, to_numpy(member)) for name, member in _tff.to_elements(value)])
        return value.numpy() if isinstance(value, tf.Tensor) else None

    def to_numpy(value: Any) -> Any:
        return tree.traverse(converted, value)

    class NumpyEngine(InProcessEngine):
        def invoke(self, comp: Any, arg: Any) -> Any:
            return to_numpy(super().invoke(comp, arg))

    kind = NumpyEngine if as_numpy else InProcessEngine

    def create(*_: object, **__: object) -> InProcessEngine:
        return kind(device="cpu")

    def install(*_: object, **__: object) -> None:
        _tff.get_context_stack().set_default_context(create())

    def skip(*_: object, **__: object) -> None:
        raise unittest.SkipTest("the in-process engine has neither an asynchronous nor a mergeable context")

    for backend, names in _CONTEXTS.items():
        package = f"tensorflow_federated.python.core.backends.{backend}"
        for module in (package, f"{package}.execution_contexts"):
            for name, is_synchronous in zip(names, (True, False, False), strict=False):
                for prefix, replacement in (("create", create), ("set", install)):
                    full_name = f"{prefix}_{name}_execution_context"
                    if not hasattr(sys.modules[module], full_name):
                        raise AttributeError(f"{module} has no {full_name}: this is another version of TFF")
                    setattr(sys.modules[module], full_name, replacement if is_synchronous else skip)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3], sys.argv[4:])
