"""Defines a Bazel toolchain from the Python of the project's own environment.

TFF 0.87 cannot be installed by Bazel's pip rules (one of its pins has left PyPI), so the environment is made by
`make setup` outside Bazel, and Bazel uses its interpreter.
"""

_BUILD = """
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

py_runtime(
    name = "python3",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":python3",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

def _local_python(context):
    interpreter = context.os.environ.get("TFF_PDP_PYTHON")
    if not interpreter:
        workspace = context.path(Label("//:BUILD")).dirname
        interpreter = str(workspace.get_child(".venv").get_child("bin").get_child("python"))
    if not context.path(interpreter).exists:
        fail("There is no Python at {}: run make setup, or set TFF_PDP_PYTHON.".format(interpreter))
    context.file("BUILD", _BUILD.format(interpreter = interpreter))

local_python = repository_rule(
    implementation = _local_python,
    environ = ["TFF_PDP_PYTHON"],
    local = True,
)
