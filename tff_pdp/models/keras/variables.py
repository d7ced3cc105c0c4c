"""Names a Keras model's variables, and calls the model with tensors in their places.

Keras 2 stores weights in variables that are attributes of layers. A pure function of weights needs tensors there
instead: each attribute that holds a variable is replaced for the time of a call, and set back afterwards. A lock keeps
other threads out for this time.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

# Replaced attributes are those of the model itself, which all threads share. One thread may call a model inside of
# another model.
_LOCK = threading.RLock()
# Keras's own lists of variables, which no layer computes with.
_LISTS = ("_trainable_weights", "_non_trainable_weights", "_obj_reference_counts_dict")
_OF_TRACKING = ("_self_", "_unconditional_")


class Attribute(NamedTuple):
    """An attribute of a layer or module that holds variables: a variable itself, or a nest of lists and mappings."""

    owner: Any
    name: str
    value: Any


def named_layers(model: tf.keras.layers.Layer) -> dict[str, tf.keras.layers.Layer]:
    """Returns a model's layers by path, the model's own path being empty; layers inside of layers come after these.

    Keras numbers layers without a name of their own by what the process built before, such as `dense_7`. Here such
    layers are numbered within the layer or model that they belong to, so building a model again gives the same names.
    """
    found: dict[str, tf.keras.layers.Layer] = {}
    seen: set[int] = set()

    def visit(layer: tf.keras.layers.Layer, path: str) -> None:
        found[path] = layer
        seen.add(id(layer))
        used: set[str] = set()
        for inner in layer._flatten_layers(recursive=False, include_self=False):
            if id(inner) in seen:
                continue
            name = _unused(_own_name(inner), used)
            visit(inner, f"{path}/{name}" if path else name)

    visit(model, "")
    return found


def _own_name(layer: tf.keras.layers.Layer) -> str:
    """Returns the layer's name, without the number that Keras has added."""
    kind = re.sub(r"([a-z])([A-Z])", r"\1_\2", re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", type(layer).__name__))
    return kind.lower() if re.fullmatch(rf"{kind.lower()}(_\d+)?", layer.name) else layer.name


def _unused(name: str, used: set[str]) -> str:
    """Returns the name, with a number if it is in use, and adds the result to the names in use."""
    number, found = 0, name
    while found in used:
        number += 1
        found = f"{name}_{number}"
    used.add(found)
    return found


def named_variables(model: tf.keras.Model) -> dict[str, tf.Variable]:
    """Returns all variables by name, in the order of Keras: the layer's path and the variable's own name.

    An example of a name is `dense/kernel`.
    """
    used: set[str] = set()
    names: dict[int, str] = {}
    of_layers = [
        (path, variable)
        for path, layer in named_layers(model).items()
        for variable in (*layer._trainable_weights, *layer._non_trainable_weights)
    ]
    # Variables of plain modules belong to no layer.
    for path, variable in [*of_layers, *(("", variable) for variable in model.weights)]:
        if id(variable) not in names:
            own = variable.name.partition(":")[0].rpartition("/")[2]
            names[id(variable)] = _unused(f"{path}/{own}" if path else own, used)
    return {names[id(variable)]: variable for variable in model.weights}


def attributes_with(model: tf.keras.Model, variables: Mapping[str, tf.Variable]) -> list[Attribute]:
    """Returns the attributes, of the model and all that it consists of, in which the variables are found."""
    wanted = {id(variable) for variable in variables.values()}
    return [
        Attribute(owner, name, value)
        for owner in (model, *model.submodules)
        for name, value in vars(owner).items()
        if name not in _LISTS and not name.startswith(_OF_TRACKING) and _holds(value, wanted)
    ]


def _holds(value: Any, wanted: set[int]) -> bool:
    if id(value) in wanted:
        return True
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(_holds(one, wanted) for one in inner)


def with_values(attribute: Attribute, values: Callable[[int], Any]) -> Any:
    """Returns an attribute's value, with `values(id of variable)` in place of each variable, if this is not None."""

    def replaced(value: Any) -> Any:
        found = values(id(value))
        if found is not None:
            return found
        if isinstance(value, Mapping):
            return {key: replaced(one) for key, one in value.items()}
        return [replaced(one) for one in value] if isinstance(value, list | tuple) else value

    return replaced(attribute.value)


@contextlib.contextmanager
def attributes_set(replacements: list[Attribute]) -> Iterator[None]:
    """Sets attributes in the `with` block, in which no other thread sets attributes, and then sets them back."""
    missing = object()
    with _LOCK:
        before = [(vars(one.owner), one.name, vars(one.owner).get(one.name, missing)) for one in replacements]
        try:
            for one in replacements:
                # Past Keras, which would track a tensor or a function.
                vars(one.owner)[one.name] = one.value
            yield
        finally:
            for held, name, value in reversed(before):
                if value is missing:
                    held.pop(name, None)
                else:
                    held[name] = value
