"""The workloads run with deterministic operations, as noised training on a GPU does, and repeat their bits."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.places import ROOT


@pytest.mark.timeout(175)
def test_workloads_with_noise_repeat_their_bits_with_deterministic_operations():
    program = """
    import numpy as np
    from benchmarks.rounds.contenders.ours import FORMS
    from benchmarks.rounds.workloads import build_workload
    from tff_pdp.engines import devices

    # Users with the server's noise, one by one; silos with DP-SGD, as stacks.
    CASES = {("W2-dp", 4): "loop", ("W3", 8): "vectorized"}

    def bits():
        found = {}
        for (name, clients), form in CASES.items():
            rounds = FORMS[form](build_workload(name, clients))
            weights = rounds.run(rounds.prepare(0))
            rounds._stack.close()
            found[name] = np.concatenate([weight.ravel() for _, weight in sorted(weights.items())])
        return found

    before = bits()
    devices.use_deterministic_operations()
    after, again = bits(), bits()
    for name in CASES:
        # Another cross entropy rounds otherwise: a few units of 2^-24 of weights below 1.
        assert np.abs(before[name[0]] - after[name[0]]).max() <= 1e-6, name
        assert after[name[0]].tobytes() == again[name[0]].tobytes(), name
    print("same")
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
    assert done.stdout == "same\n", done.stderr[-2000:]
