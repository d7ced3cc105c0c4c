import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from serving.errors import RequestError
from serving.server.loaded_version import Batcher
from serving.server.options import BatchingOptions
from tests.serving.server.fake_servable import FakeServable, write_version


@pytest.fixture
def servable(tmp_path):
    return FakeServable(write_version(tmp_path, 1, scale=3))


def rows(*values):
    """One request with an example for each value."""
    return {"x": np.array([[value, -value] for value in values], np.float32)}


class Queue:
    """A batcher whose first request holds the only thread until `release`, so that the others wait."""

    def __init__(self, servable, executor, options):
        self.batcher = Batcher(
            lambda inputs: servable.run("", inputs), options, executor.submit, lambda sizes, total: None
        )
        self.servable = servable

    async def hold(self):
        self.servable.gate.clear()
        self.first = asyncio.create_task(self.batcher.run(rows(0)))
        while not self.servable.sizes:
            await asyncio.sleep(0.001)

    async def send(self, *requests):
        """Starts requests and lets them enter the queue."""
        tasks = [asyncio.create_task(self.batcher.run(request)) for request in requests]
        await asyncio.sleep(0)
        return tasks

    async def release(self, *tasks):
        self.servable.gate.set()
        await self.first
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def in_queue(servable):
    """Runs a scenario with a queue whose thread is held."""

    def run(scenario, **options):
        async def main():
            with ThreadPoolExecutor(4) as executor:
                queue = Queue(servable, executor, BatchingOptions(**options))
                await queue.hold()
                try:
                    return await scenario(queue)
                finally:
                    servable.gate.set()

        return asyncio.run(main())

    return run


def test_an_idle_model_answers_at_once(servable):
    async def main():
        with ThreadPoolExecutor(1) as executor:
            return await Batcher(
                lambda inputs: servable.run("", inputs), BatchingOptions(), executor.submit, lambda sizes, total: None
            ).run(rows(2))

    np.testing.assert_array_equal(asyncio.run(main())["y"], [[6, -6]])
    assert servable.sizes == [1]


def test_what_waits_leaves_together_and_each_gets_its_own_rows(in_queue, servable):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), rows(2, 3), rows(4)))

    answers = in_queue(scenario)
    assert servable.sizes == [1, 4]
    assert [answer["y"][:, 0].tolist() for answer in answers] == [[3], [6, 9], [12]]


def test_a_batch_is_as_full_as_whole_requests_make_it(in_queue, servable):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1, 2), rows(3), rows(4, 5), rows(6)))

    in_queue(scenario, max_batch_size=4)
    # 2 + 1, as the next two would make five; then 2 + 1.
    assert servable.sizes == [1, 3, 3]


def test_a_request_over_the_maximum_runs_on_its_own(in_queue, servable):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), rows(*range(5)), rows(2)))

    answers = in_queue(scenario, max_batch_size=4)
    assert servable.sizes == [1, 1, 5, 1]
    assert len(answers[1]["y"]) == 5


def test_only_the_guilty_request_of_a_batch_fails(in_queue, servable):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), rows(np.nan), rows(2)))

    first, guilty, last = in_queue(scenario)
    assert first["y"].tolist() == [[3, -3]]
    assert last["y"].tolist() == [[6, -6]]
    assert isinstance(guilty, RequestError)
    assert (guilty.code, guilty.message) == (grpc.StatusCode.INVALID_ARGUMENT, "x must be finite")
    assert servable.sizes == [1, 3, 1, 1, 1]


def test_a_request_that_fails_alone_is_run_once(servable):
    async def main():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(
                lambda inputs: servable.run("", inputs), BatchingOptions(), executor.submit, lambda sizes, total: None
            )
            with pytest.raises(RequestError, match="x must be finite"):
                await batcher.run(rows(np.nan))

    asyncio.run(main())
    assert servable.sizes == [1]


def test_a_full_queue_is_unavailable_and_recovers(in_queue):
    async def scenario(queue):
        waiting = await queue.send(rows(1, 2), rows(3, 4))
        with pytest.raises(RequestError) as refused:
            await queue.batcher.run(rows(5))
        answers = await queue.release(*waiting)
        return refused.value, answers, await queue.batcher.run(rows(5))

    refused, answers, later = in_queue(scenario, max_batch_size=2, max_enqueued_batches=2)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.message == (
        "The batch scheduling queue to which this task was submitted is full; currently 2 batches enqueued and "
        "max_enqueued_batches is 2"
    )
    assert [answer["y"][0, 0] for answer in (*answers, later)] == [3, 9, 15]


def test_a_cancelled_request_leaves_the_queue_and_makes_room(in_queue, servable):
    async def scenario(queue):
        gone, stays = await queue.send(rows(1), rows(2))
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        # Two examples fit in the queue: one waits, so this one finds room.
        (new,) = await queue.send(rows(3))
        return await queue.release(stays, new)

    answers = in_queue(scenario, max_batch_size=2, max_enqueued_batches=1)
    assert [answer["y"][0, 0] for answer in answers] == [6, 9]
    assert servable.sizes == [1, 2]


def test_a_request_cancelled_while_it_runs_harms_no_other(in_queue, servable):
    async def scenario(queue):
        tasks = await queue.send(rows(1), rows(2))
        servable.gate.set()
        await queue.first
        servable.gate.clear()
        while len(servable.sizes) < 2:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        return await queue.release(*tasks)

    gone, stays = in_queue(scenario)
    assert isinstance(gone, asyncio.CancelledError)
    assert stays["y"].tolist() == [[6, -6]]


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.ones((1, 3), np.float32)},
        {"x": np.ones((1, 2), np.float64)},
        {"x": np.ones((1, 2), np.float32), "z": np.ones((1, 2), np.float32)},
    ],
    ids=["inner shape", "dtype", "keys"],
)
def test_requests_of_different_kinds_are_never_merged(in_queue, servable, other):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), other, rows(2)))

    in_queue(scenario)
    assert servable.sizes == [1, 2, 1]


def test_kinds_take_turns(in_queue, servable):
    run, widths = servable.run, []
    servable.run = lambda name, inputs: widths.append(inputs["x"].shape[1]) or run(name, inputs)

    async def scenario(queue):
        wide = {"x": np.ones((2, 3), np.float32)}
        return await queue.release(*await queue.send(rows(1, 2), rows(3, 4), rows(5, 6), wide))

    in_queue(scenario, max_batch_size=2)
    # The request that held the thread; then the wide one does not wait for all that came before it.
    assert widths == [2, 2, 3, 2, 2]


@pytest.mark.parametrize(
    "other", [{"x": np.ones((2, 2)), "z": np.ones((1, 2))}, {"x": np.ones((0, 2), np.float32)}], ids=["sizes", "empty"]
)
def test_requests_without_a_common_first_size_run_on_their_own(in_queue, servable, other):
    async def scenario(queue):
        return await queue.release(*await queue.send(other, other))

    in_queue(scenario, allowed_batch_sizes=(8,), max_batch_size=8)
    # The first request, of one example, was padded.
    assert servable.sizes == [8, len(other["x"]), len(other["x"])]


def test_batches_are_padded_to_an_allowed_size_and_cut_again(in_queue, servable):
    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), rows(2), rows(3), rows(*range(9))))

    answers = in_queue(scenario, allowed_batch_sizes=(2, 4, 8), max_batch_size=8)
    # 1 to 2; 3 to 4; 9 is over the maximum and is left as it is.
    assert servable.sizes == [2, 4, 9]
    assert [len(answer["y"]) for answer in answers] == [1, 1, 1, 9]
    assert answers[2]["y"].tolist() == [[9, -9]]


@pytest.mark.parametrize("output", [np.float32(1), np.ones(1, np.float32)], ids=["scalar", "one row"])
def test_outputs_that_cannot_be_divided_are_computed_one_by_one(in_queue, servable, output):
    run, servable.run = servable.run, lambda name, inputs: {"y": output, "z": run(name, inputs)["y"]}

    async def scenario(queue):
        return await queue.release(*await queue.send(rows(1), rows(2)))

    answers = in_queue(scenario)
    assert servable.sizes == [1, 2, 1, 1]
    assert [answer["z"][0, 0] for answer in answers] == [3, 6]


def test_several_batches_run_at_the_same_time_if_asked_to(servable):
    async def main():
        with ThreadPoolExecutor(4) as executor:
            options = BatchingOptions(max_batch_size=1, num_batch_threads=3)
            batcher = Batcher(
                lambda inputs: servable.run("", inputs), options, executor.submit, lambda sizes, total: None
            )
            servable.gate.clear()
            tasks = [asyncio.create_task(batcher.run(rows(value))) for value in range(5)]
            while len(servable.sizes) < 3:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            started = len(servable.sizes)
            servable.gate.set()
            await asyncio.gather(*tasks)
            return started

    assert asyncio.run(main()) == 3
