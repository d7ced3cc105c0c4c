"""One long-lived thread with an event loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class EventLoopThread:
    """Runs functions and coroutines, in the order of their submission, in a thread of its own until it is stopped."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        # The target is a method of the loop, not of this object, so that the thread keeps nothing else alive. It is a
        # daemon because the interpreter would otherwise wait for it before anything could stop it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="tff-pdp-engine", daemon=True)
        self._thread.start()

    def call(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Calls a function in the thread and waits for what it returns or raises."""

        async def call_in_thread() -> _Result:
            return function(*args, **kwargs)

        return self.submit(call_in_thread()).result()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Starts a coroutine in the thread without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Ends the thread; what still runs in it is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        # A finalizer may run in any thread, this one included, and a thread cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
