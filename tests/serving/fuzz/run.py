"""Attacks a server with requests that follow from a seed and their number.

python -m tests.serving.fuzz.run --requests 100000 --seed 7
python -m tests.serving.fuzz.run --seed 7 --number 4711      repeats one request and shows the answer
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import grpc

from tests.serving.fuzz import http_requests, proto_requests, senders
from tests.serving.fuzz.cases import Case, ServedModel
from tests.serving.fuzz.invariants import FileWatch, Prober, ProcessWatch, SlowSenders, log_problems
from tests.serving.fuzz.target import Target, canaries, export_model, running_target

_THREADS = 12
_BATCH = 1_000
_WARM_UP_REQUESTS = 300
_MAX_FAILURES = 25
_HTTP_SHARE = 0.6


@dataclasses.dataclass
class Outcome:
    """What an attack found.

    Attributes:
      failures: what was wrong, the first of each kind with the seed and number of its request where there is one.
      num_failures: how often something was wrong.
      counts: how often each kind of case ended how.
      probes: valid requests answered meanwhile, over each protocol.
      slowest_probe_seconds: the longest of them.
      usage: figures of the server's process at the start and at the end.
      seconds: how long the attack took.
    """

    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    num_failures: int = 0
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    probes: int = 0
    slowest_probe_seconds: float = 0.0
    usage: tuple[dict[str, int], dict[str, int]] = ({}, {})
    seconds: float = 0.0

    def add(self, place: str, category: str, problem: str) -> None:
        """Notes a failure; of those that read alike only the first is kept."""
        self.num_failures += 1
        self.failures.setdefault(category + re.sub(r"\d+", "0", problem)[:60], f"{place}: {problem}")


def make_case(seed: int, number: int, served: ServedModel) -> Case:
    """The case with this number; the same in every run."""
    rng = random.Random(f"{seed}/{number}")
    generate = http_requests.generate if rng.random() < _HTTP_SHARE else proto_requests.generate
    return generate(rng, served)


def attack(target: Target, served: ServedModel, root: Path, seed: int, numbers: Iterable[int]) -> Outcome:
    """Sends the cases from several threads, valid requests beside them, and checks the server after every batch."""
    outcome, numbers, start = Outcome(), list(numbers), time.monotonic()
    with contextlib.ExitStack() as stack:
        channels = [
            # Options that differ keep the channels from sharing one connection.
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}", [("fuzz", i)]))
            for i in range(_THREADS)
        ]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(_THREADS))
        own = threading.local()
        free = list(channels)

        def send(number: int) -> tuple[int, Case, str, Exception | None]:
            if not hasattr(own, "channel"):
                own.channel = free.pop()
            case = make_case(seed, number, served)
            try:
                return number, case, senders.send(case, target.rest_port, target.grpc_port, own.channel), None
            except (senders.Wrong, OSError) as error:
                return number, case, "wrong", error

        def send_all(batch: Iterable[int]) -> None:
            for number, case, ended, error in pool.map(send, batch):
                outcome.counts[f"{case.category}: {ended}"] += 1
                if error is not None:
                    outcome.add(f"seed {seed} number {number}", case.category, f"{error}\n    sent: {case}")

        # Threads and buffers that every use brings are no leak.
        send_all(range(-_WARM_UP_REQUESTS, 0))
        process, files = ProcessWatch(target.process), FileWatch(canaries(root))
        stack.callback(files.close)
        prober = Prober(served, target.rest_port, target.grpc_port)
        slow = SlowSenders(target.rest_port, 20)
        stack.callback(slow.close)
        prober.start()
        for first in range(0, len(numbers), _BATCH):
            send_all(numbers[first : first + _BATCH])
            slow.drip()
            memory = process.problems_once_settled(idle=False)
            for problem in [*files.problems(), *log_problems(target.log), *memory]:
                outcome.add(f"seed {seed} before number {first + _BATCH}", "", problem)
            if len(outcome.failures) >= _MAX_FAILURES or target.process.poll() is not None:
                break
        prober.stop()
        slow.close()
        for problem in prober.found:
            outcome.add(f"seed {seed}", "probe", problem)
        outcome.probes, outcome.slowest_probe_seconds = prober.count, prober.slowest_seconds
        for channel in channels:
            channel.close()
    outcome.seconds = time.monotonic() - start
    if target.process.poll() is None:
        for problem in process.problems_once_settled(idle=True):
            outcome.add(f"seed {seed}, at the end", "", problem)
        outcome.usage = (process.first, process.now())
    return outcome


def main() -> int:
    """Runs one attack and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="default 10,000")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--number", type=int, help="send only the request with this number")
    parser.add_argument("--counts", action="store_true", help="print how often each kind of request ended how")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        served = export_model(root)
        with running_target(root) as target:
            if options.number is not None:
                return _repeat(target, served, options.seed, options.number)
            outcome = attack(target, served, root, options.seed, range(options.requests))
    if options.counts:
        print("\n".join(f"{count:7d}  {kind}" for kind, count in sorted(outcome.counts.items())))
    print("\n".join(outcome.failures.values()))
    print(
        f"seed {options.seed}: {outcome.counts.total()} requests in {outcome.seconds:.1f} s, "
        f"{outcome.num_failures} failures\n{outcome.probes} valid requests over each protocol meanwhile, the slowest "
        f"took {outcome.slowest_probe_seconds:.2f} s\nserver at first {outcome.usage[0]}, at last {outcome.usage[1]}"
    )
    return 1 if outcome.failures else 0


def _repeat(target: Target, served: ServedModel, seed: int, number: int) -> int:
    case = make_case(seed, number, served)
    print(case)
    with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:
        try:
            print("ended:", senders.send(case, target.rest_port, target.grpc_port, channel))
        except senders.Wrong as error:
            print("WRONG:", error)
            return 1
        finally:
            print(target.log.read_text(encoding="utf-8", errors="replace")[-5000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
