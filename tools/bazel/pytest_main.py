"""Runs pytest on the test files that a Bazel target names."""

import os
import sys

import pytest

if __name__ == "__main__":
    # Bazel's sandbox is read-only but for this folder.
    scratch = os.environ["TEST_TMPDIR"]
    options = ["-p", "no:cacheprovider", f"--basetemp={scratch}/pytest", "--rootdir=.", "--import-mode=importlib"]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
