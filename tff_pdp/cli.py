"""Defines the program `tff-pdp`: its commands, and the class that runs each command.

The modules of these classes import TensorFlow and TFF only in `run`: an import takes seconds, and `--help` should not.
"""

import functools
import sys

from beam_pipelines.__main__ import JOBS
from tff_pdp import __version__, command_line

_ABOUT = """\
Personalised, differentially private federated learning: from raw client data to personal models behind
TensorFlow Serving.

A whole experiment, in the order data flows:
  tff-pdp prepare  --config demo                 raw LEAF JSON -> client dataset
  tff-pdp data     describe --config demo        clients, labels, columns; tables also before they are prepared
  tff-pdp train    --config demo                 client dataset -> personal models and a privacy ledger
  tff-pdp evaluate --config demo                 test metrics, report.html, summary.json
  tff-pdp export   --config demo                 personal models -> one SavedModel
  tff-pdp serve    --model-base-path runs/demo/export/digits
  tff-pdp predict  --config demo --client-id silo_03 --address localhost:8501
  tff-pdp verify   runs/demo                     checks digests and chains, computes epsilon, offline
  tff-pdp audit    budgets --config demo --algorithm fed_avg    what uploads reveal of silos' budgets
  tff-pdp seal     runs/demo                     destroys the key of the noise, keeps the record

`tff-pdp run --config demo` prepares, trains, evaluates and exports in one. `tff-pdp status runs/demo` shows how far
runs have come. `tff-pdp forget` removes a client, and states what remains of it. `tff-pdp demo` does all of it on 1,797
real digits. `tff-pdp COMMAND --help` explains one command.
"""

_EXPERIMENT, _RECORD = "tff_pdp.commands.experiment", "tff_pdp.commands.record"
_CLIENTS, _WATCHING = "tff_pdp.commands.clients", "tff_pdp.commands.watching"
AUDITS = command_line.Table(
    "tff-pdp audit",
    "Measure what an observer can infer from a run beyond the guarantee.",
    {"budgets": "tff_pdp.commands.audit:AuditBudgets"},
)
DATA = command_line.Table(
    "tff-pdp data",
    "Look at data before and after they are prepared.",
    {"describe": "tff_pdp.commands.data:DescribeData"},
)
COMMANDS = command_line.Table(
    "tff-pdp",
    _ABOUT,
    {
        "data": DATA,
        "prepare": f"{_EXPERIMENT}:Prepare",
        "train": f"{_EXPERIMENT}:Train",
        "tune": f"{_EXPERIMENT}:Tune",
        "evaluate": f"{_EXPERIMENT}:Evaluate",
        "run": "tff_pdp.commands.whole:Run",
        "status": f"{_WATCHING}:Status",
        "compare": f"{_WATCHING}:Compare",
        "list": f"{_WATCHING}:List",
        "config": f"{_EXPERIMENT}:Config",
        "account": "tff_pdp.commands.account:Account",
        "synthesize": "tff_pdp.commands.synthesize:Synthesize",
        "export": f"{_EXPERIMENT}:Export",
        "personalize": f"{_CLIENTS}:Personalize",
        "verify": f"{_RECORD}:Verify",
        "audit": AUDITS,
        "seal": f"{_RECORD}:Seal",
        "forget": f"{_RECORD}:Forget",
        "serve": "serving.commands:Serve",
        "predict": f"{_CLIENTS}:Predict",
        "verify-export": "serving.commands:Verify",
        "client-id": "serving.commands:ClientId",
        "deploy": "serving.commands:Deploy",
        "rollout": "serving.commands:Rollout",
        "job": JOBS,
        "demo": f"{_EXPERIMENT}:Demo",
        "reproduce": f"{_EXPERIMENT}:Reproduce",
        "doctor": f"{_EXPERIMENT}:Doctor",
    },
    version=f"tff-pdp {__version__}",
)
# Runs one command, and returns its exit status.
main = functools.partial(command_line.main, COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
