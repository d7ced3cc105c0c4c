"""Which algorithms run on every engine in `make test`; `make test-all` runs all of them on all.

To trace a round for stacked clients takes seconds, and two algorithms that call the same functions are traced alike. So
a few stand for all: whatever function of `tff_pdp/algorithms/*.py` a registered algorithm calls, with whatever options
of the local solver, one of these calls it, too. `test_covering.py` fails where that has ceased to be so.
"""

import dataclasses
import sys
from pathlib import Path

import tff_pdp.algorithms
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.testing.algorithms import run_once

COVERING = {
    "mr_mtl": "an anchor, and the pull to it inside the clip",
    "apfl": "two passes over the data, by two trajectories at the same time",
    "fed_nova": "public scalars",
    "mocha": "relations between clients, and a client's own place and row",
    "ifca": "candidates, and sums in the places of clusters",
    "dp_pfed_dsu": "a shared part, adaptation, masks, a view, and a penalty",
}
# How noise is drawn is the estimator's: one algorithm stands for all where a model is large.
COVERING_LARGE = {"mr_mtl": "a step's noise is drawn where it is needed"}
# All that users release is one vector, whatever the algorithm: three stand for the forms of what they keep.
COVERING_USERS = {
    "dp_fed_avg_ft": "nothing is kept",
    "centaur": "a part of the weights is kept",
    "udp_hypernet": "a state that is no weights is kept",
}

_ROOM = Path(tff_pdp.algorithms.__file__).parent
_OPTIONS = {field.name: field.default for field in dataclasses.fields(Trajectory) if field.name != "start"}


def operations_of(algorithm):
    """Names all that a round of an algorithm asks of the parts it is made of and of the process around it.

    These are the functions of `tff_pdp/algorithms/*.py` that it calls, the options of the local solver, the kinds of
    aggregation, and the members of `Algorithm` that a process treats in another way.
    """
    called = {f"released as {kind}" for kind in algorithm.released.values()}
    called |= {f"public {kind}" for kind in algorithm.public.values()}
    called |= {f"takes {name}" for name, one in algorithm.hparams.items() if one.is_set_by_runtime}
    called |= {
        f"has {name}" for name in ("candidates", "adapt", "global_model") if getattr(algorithm, name) is not None
    }
    called |= {f"{algorithm.data_passes} passes", f"{len(algorithm.step_hparams)} counts of steps"}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and Path(code.co_filename).parent == _ROOM and "<" not in code.co_qualname:
            called.add(f"{Path(code.co_filename).stem}.{code.co_qualname}")
            if code is local_sgd.__code__:
                called.update(_asked_of_the_solver(**frame.f_locals))

    sys.setprofile(note)
    try:
        run_once(algorithm)
    finally:
        sys.setprofile(None)
    return called


def _asked_of_the_solver(start, first_index, **_):
    """Names the options of the trajectories, and whether gradients are numbered from another than the first."""
    several = start if isinstance(start, tuple) else (start,)
    given = {f"{len(several)} trajectories"} if len(several) > 1 else set()
    if not isinstance(first_index, int) or first_index:
        given.add("first_index")
    for one in several:
        for name, default in _OPTIONS.items():
            value = getattr(one, name, default)
            if value is not default and not (isinstance(value, int | float) and value == default):
                given.add(name)
    return {f"local_sgd({name})" for name in given}
