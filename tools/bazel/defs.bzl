"""Defines one Bazel target per pytest file."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

_PYTEST_MAIN = "//tools/bazel:pytest_main.py"

def pytest_tests(files, deps = [], data = []):
    """Declares a test target for each file, named after the file, and `support`, for tests of other packages.

    Args:
      files: test files of the package, usually from a glob.
      deps: targets of other test packages that the tests read.
      data: files that the tests read besides the experiments' settings.
    """
    py_library(
        name = "support",
        srcs = native.glob(["*.py"], exclude = ["test_*.py"]),
        visibility = ["//tests:__subpackages__"],
    )
    for file in files:
        py_test(
            name = file[:-len(".py")],
            # An import of TensorFlow takes most of a minute where the sandbox finds no compiled bytecode.
            size = "medium",
            # All files of the folder: fixtures, helpers, and tests that another file builds upon.
            srcs = native.glob(["*.py"]) + [_PYTEST_MAIN],
            args = ["$(location {})".format(file)],
            data = ["//:pyproject.toml"] + data,
            main = _PYTEST_MAIN,
            deps = ["//beam_pipelines", "//benchmarks", "//serving", "//tests:support", "//tff_pdp"] + deps,
        )
