"""Work on large requests, in a thread: the event loop answers others meanwhile."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# What takes about a millisecond: handing it to a thread takes a tenth of that.
LARGE_BYTES = 128 * 1024
LARGE_ELEMENTS = 128 * 1024

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def off_loop(
    is_large: bool,
    function: Callable[Parameters, Result],
    *arguments: Parameters.args,
    **options: Parameters.kwargs,
) -> Result:
    """Calls a function that waits for nothing: in a thread if its work is large, else here and now."""
    if is_large:
        return await asyncio.to_thread(function, *arguments, **options)
    return function(*arguments, **options)
