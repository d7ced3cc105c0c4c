"""The benchmark of the start: the figures that it makes of its measurements, and the end of its demo."""

import json

from benchmarks.machine import Cost
from benchmarks.start_up import first_round, run
from tff_pdp.commands import demo
from tff_pdp.training import train


def test_medians_are_of_the_counted_starts(monkeypatch):
    started = []

    def measured(command):
        module, argument = command[2:4]
        name = argument if module == "tff_pdp.cli" else module
        started.append(name)
        # Starts of one command take 1, 2, 3, ... s; the first is not counted. Half of it is processor time.
        wall = float(started.count(name))
        parts = {part: {"s": wall * number, "cpu_s": wall} for number, part in enumerate(first_round.PARTS)}
        return Cost(cpu_s=wall / 2, wall_s=wall, peak_rss_mb=0.0, output="a line before\n" + json.dumps(parts))

    monkeypatch.setattr(run, "measure_command", measured)
    content = run.measure(repetitions=3)
    rows = {row["command"]: row for row in content["rows"]}
    assert rows["help"] == {
        "command": "help",
        "bound_s": 0.3,
        "s": 3.0,
        "fastest_s": 2.0,
        "slowest_s": 4.0,
        "cpu_s": 1.5,
        "fastest_cpu_s": 1.0,
    }
    # Building has factor 2, the round 3, preparing 1.
    assert rows["first round"]["s"] == 5 * 3.0 and rows["first round"]["bound_s"] == 5.0
    assert rows["demo after imports"]["s"] == 6 * 3.0 and rows["demo after imports"]["cpu_s"] == 3 * 3.0
    assert rows["demo: round"]["fastest_s"] == 3 * 2.0 and rows["demo: round"]["bound_s"] is None
    assert len(started) == 3 * 4


def test_the_demo_ends_after_one_round(tmp_path, monkeypatch):
    done = []

    def run_demo(output, data, overrides):
        assert output == tmp_path / "demo" and data is None
        # Runs of the benchmark must not stay in the registry of the computer.
        assert overrides == {"privacy.registry": str(tmp_path / "registry")}
        for step in (train.build_method, train.run_round, lambda: done.append("more")):
            step()

    monkeypatch.setattr(demo, "run_demo", run_demo)
    for name in ("build_method", "run_round"):
        monkeypatch.setattr(train, name, lambda name=name: done.append(name))
    parts = first_round.measure(tmp_path)
    assert done == ["build_method", "run_round"]
    assert list(parts) == ["imports", "prepare", "build", "round"]
    assert all(part["s"] >= 0 and part["cpu_s"] >= 0 for part in parts.values())
