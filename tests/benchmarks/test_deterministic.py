"""The workloads run with deterministic operations, as noised training on a GPU does, and keep their bits on the CPU."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.places import ROOT


@pytest.mark.timeout(175)
def test_workloads_with_noise_keep_their_bits_with_deterministic_operations():
    program = """
    from benchmarks.rounds.contenders.ours import FORMS
    from benchmarks.rounds.workloads import build_workload
    from tff_pdp.engines import devices

    # Users with the server's noise, one by one and as stacks; silos with DP-SGD.
    CASES = {("W2-dp", 4): "loop", ("W1-dp", 2): "vectorized", ("W3", 8): "vectorized"}

    def bits():
        found = {}
        for (name, clients), form in CASES.items():
            rounds = FORMS[form](build_workload(name, clients))
            weights = rounds.run(rounds.prepare(0))
            rounds._stack.close()
            found[name] = b"".join(weight.tobytes() for _, weight in sorted(weights.items()))
        return found

    before = bits()
    devices.use_deterministic_operations()
    after = bits()
    print([name for name in before if before[name] == after[name]])
    """
    done = subprocess.run(
        [sys.executable, "-c", "import tff_pdp\n" + textwrap.dedent(program)],
        cwd=ROOT,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.stdout == "['W2-dp', 'W1-dp', 'W3']\n", done.stderr[-2000:]
