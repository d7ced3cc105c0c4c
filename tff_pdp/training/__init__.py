"""Training: each round charges the ledger, runs, and may write a checkpoint.

record: the record of runs' spending, on disk before anything is spent
client_store: clients' states from round to round
checkpoint: saves state, ledger, key and round in one folder
rounds: makes the first state, and runs a round
spending: puts rounds on record before they are run
run_folder: configuration, choices and metrics beside the checkpoints
counted: enters runs into the registry; composes the cost of all runs on the same records
train: the loop
privacy_facts: facts of the statement, from plans and ledgers
evaluate: test metrics, report, summary
search: a private search for hyper-parameters
"""
