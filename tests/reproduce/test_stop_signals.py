import signal
import threading
from multiprocessing import connection

import pytest

from tff_pdp.reproduce.workers import StopSignals


@pytest.fixture
def handled():
    """Signals that arrive at handlers of this test, which stand in for whatever the process has."""
    arrived = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, lambda number, frame: arrived.append(number))
    yield arrived
    for number, handler in before.items():
        signal.signal(number, handler)


def is_readable(stop):
    return connection.wait([stop.descriptor], 0) == [stop.descriptor]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_wakes_whoever_waits_and_takes_effect_afterwards(handled, number):
    handler = signal.getsignal(number)
    with StopSignals() as stop:
        assert not is_readable(stop)
        signal.raise_signal(number)
        # Arrived before anyone waited for it.
        assert is_readable(stop)
        assert stop.received == number
        signal.raise_signal(signal.SIGINT)
        assert stop.received == number
        assert handled == []
    assert handled == [number]
    assert signal.getsignal(number) is handler
    assert signal.set_wakeup_fd(-1) == -1


def test_without_a_signal_nothing_happens(handled):
    with StopSignals() as stop:
        assert stop.received is None
    assert handled == []


def test_other_signals_and_ignored_ones_are_left_alone(handled):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        assert stop.received is None
        assert handled == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_it_takes_effect_where_an_error_ends_the_context_too(handled):
    with pytest.raises(ValueError, match="an error"), StopSignals():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("an error")
    assert handled == [signal.SIGINT]


def test_another_thread_has_no_signals_to_wait_for():
    found = []

    def run():
        with StopSignals() as stop:
            found.append(stop.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]
