"""The process behind `FreshProcess`: reads jobs, a line of JSON each, and answers each with a line of JSON.

A job has `export_dir`, `scratch` (a directory for temporary files), `timeout_seconds` and `expectations`, each with a
`signature_name` and the files of its `inputs` and `outputs`. The answer is `{"refused": reason}`, or what was found:
`signatures` (dtypes and shapes of inputs and outputs), `ops` (all that the graph uses) and `warmup_requests` (how
many were replayed).
"""

import json
import math
import os
import queue
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# Longer than the parent waits, so that it is the parent who says why.
_GRACE_SECONDS = 10
_POLL_SECONDS = 1.0


def main() -> None:
    """Answers jobs until the parent closes its end or is gone."""
    parent = int(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Whatever TensorFlow prints goes to the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # An export that takes all memory is to cost this process its life, and no other.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_jobs, args=(parent, jobs), daemon=True).start()
    # Only now, because it takes seconds, in which the parent may end.
    from serving.verify.trial import try_export

    while True:
        job = jobs.get()
        # Ends this process even where TensorFlow hangs without letting a thread of Python run.
        signal.alarm(math.ceil(job["timeout_seconds"]) + _GRACE_SECONDS)
        print(json.dumps(try_export(job)), file=answers, flush=True)
        signal.alarm(0)


def _read_jobs(parent: int, jobs: queue.Queue[dict[str, Any]]) -> None:
    buffer = b""
    # Another process may have inherited the parent's end of the pipe, so its end of file is not enough.
    while os.getppid() == parent:
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            continue
        part = os.read(0, 1 << 16)
        if not part:
            break
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            jobs.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
