"""Training: each round charges the ledger, runs, and may write a checkpoint.

record: files that state a run's spending, written before anything is spent
client_store: storage of clients' states between rounds
checkpoint: saves state, ledger, key and round in one folder
rounds: makes the first state, and runs a round
spending: writes the cost of rounds to a run's record before the rounds are run
run_folder: configuration, validation metrics and selected hyper-parameters, in files beside the checkpoints
counted: enters runs into the registry; composes the cost of all runs on the same records
traffic: bytes that real clients would send and receive
going_on: more rounds after the end of a run
tracking: reports of rounds, for `metrics.jsonl` and for trackers
progress: a bar on a terminal, or lines in a log
train: the training loop
privacy_facts: facts for the privacy statement, from plans and ledgers
evaluate: test metrics, report and summary
search: private search for hyper-parameters
"""
