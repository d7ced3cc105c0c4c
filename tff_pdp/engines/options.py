"""The ways to compute clients that an experiment can ask for; read without importing TensorFlow."""

import typing
from typing import Literal

ClientParallelism = Literal["auto", "loop", "vectorized"]
CLIENT_PARALLELISMS: tuple[ClientParallelism, ...] = typing.get_args(ClientParallelism)
