"""Damaged files of runs, by the project's readers in this process: refused by name, or without any effect."""

import collections
import random
import shutil

import pytest

from tests.tiers import amount
from tests.training.record.whole_runs import KINDS, MAKERS, files_of, kind_of, readers_of
from tff_pdp.errors import UserError

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_fresh_process")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every kind of run, by name."""
    import time
    made = {}
    for name, make in MAKERS.items():
        t = time.time()
        made[name] = make(tmp_path_factory.mktemp(name))
        print(name, time.time() - t)
    return made


def test_count(runs, tmp_path):
    import os, time, traceback
    counts = collections.Counter()
    examples = {}
    files = [(run, name) for run in runs.values() for name in files_of(run)]
    by_kind = collections.defaultdict(list)
    for run, name in files:
        by_kind[kind_of(name)].append((run, name))
    print(len(files), {k: len(v) for k, v in by_kind.items()})
    expected = {}
    for run, name in files:
        t = time.time()
        for reader in readers_of(run, name):
            if (run.name, reader) not in expected:
                t = time.time()
                expected[run.name, reader] = reader(run.copied_to(tmp_path / "whole"))
                shutil.rmtree(tmp_path / "whole")
                print(run.name, reader.__name__, round(time.time() - t, 3))
    generator = random.Random(0)
    kinds = [kind for kind in by_kind if KINDS[kind]]
    number = int(os.environ.get("DAMAGES", "200"))
    started = time.time()
    for trial in range(number):
        kind = kinds[trial % len(kinds)]
        run, name = generator.choice(by_kind[kind])
        content = (run.output / name).read_bytes()
        copy = run.copied_to(tmp_path / "damaged")
        path = copy.output / name
        how = generator.choice(["bit"] * 6 + ["byte"] * 3 + ["cut"] * 2 + ["empty", "gone"])
        what = how
        if how in ("bit", "byte") and content:
            position = generator.randrange(len(content))
            in_use = [p for p in range(len(content)) if content[p]]
            if name.endswith(".sqlite"):
                position = generator.choice(in_use)
            changed = bytearray(content)
            changed[position] ^= 1 << generator.randrange(8) if how == "bit" else generator.randrange(1, 256)
            path.write_bytes(changed)
            what = f"{how} {position}: {content[max(0,position-12):position+8]} -> {bytes(changed[max(0,position-12):position+8])}"
        elif how == "cut" and content:
            size = generator.randrange(len(content))
            path.write_bytes(content[:size])
            what = f"cut to {size} of {len(content)}"
        elif how == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
        shutil.copy(path, tmp_path / "kept") if path.exists() else None
        worst = "no effect"
        for reader in readers_of(run, name):
            copy2 = copy.copied_to(tmp_path / "again")
            import dataclasses
            text = ""
            try:
                found = reader(copy2)
                outcome = "no effect" if found == expected[run.name, reader] else "SILENT"
            except UserError as error:
                text = str(error)
                outcome = "refused" if path.name in text and "\n" not in text else "REFUSED WITHOUT NAME"
            except Exception as error:
                outcome, text = "TRACEBACK", f"{type(error).__name__}: {error} {traceback.format_exc()[-300:]}"
            shutil.rmtree(tmp_path / "again")
            order = ["no effect", "refused", "REFUSED WITHOUT NAME", "TRACEBACK", "SILENT"]
            worst = max(worst, outcome, key=order.index)
            if outcome.isupper() and len(examples.setdefault((kind, outcome, how, reader.__name__), [])) < 2:
                examples[kind, outcome, how, reader.__name__].append(f"{run.name} {name} {what}: {text[:400]}")
        counts[kind, worst] += 1
        counts["", worst] += 1
        shutil.rmtree(tmp_path / "damaged")
    print("seconds", time.time() - started)
    for key, n in sorted(counts.items()):
        print(n, key)
    for key, some in examples.items():
        for one in some:
            print(key, one)
