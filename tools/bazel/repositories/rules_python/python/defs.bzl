"""Stand-in for rules_python: the names that BUILD files load, from the rules built into Bazel 4 to 6."""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_library = native.py_library
py_binary = native.py_binary
py_test = native.py_test
py_runtime = native.py_runtime
py_runtime_pair = _py_runtime_pair
