"""A contact-graph job that kills its own process in one of its tasks; run by a test as `python -m`.

Arguments: input, output, the stage and number of the task, and `begin` or `write`: before the task does anything, or
once a part of its shard is written.
"""

import os
import signal
import sys
from pathlib import Path

from beam_pipelines.contact_graph import contact_stages
from beam_pipelines.contact_graph.job import run_contact_graph_job
from beam_pipelines.engine import run as staged
from tests.beam_pipelines.contact_graph.graph_support import options_of


def main(source: str, output: str, stage: str, number: str, moment: str) -> None:
    encode_examples = contact_stages.encode_examples
    task = f"{stage} {number}"

    class Killed(staged.TaskRun):
        def pieces(self):
            if moment == "begin" and f"{self._stage.name} {self._context.number}" == task:
                kill()
            yield from super().pieces()

    def encode_and_kill(features, x, y, ids):
        encode_and_kill.calls += 1
        if encode_and_kill.calls > 1:
            kill()
        return encode_examples(features, x, y, ids)

    encode_and_kill.calls = 0
    staged.TaskRun = Killed
    if moment == "write":
        contact_stages.encode_examples = encode_and_kill
    run_contact_graph_job(options_of(Path(source), Path(output).parent))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
