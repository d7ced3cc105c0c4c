"""Training: each round charges the ledger, runs, and may write a checkpoint.

record: the spending of runs, on disk before it happens
client_store: clients' states from round to round
checkpoint: state, ledger, key and round as one folder
rounds: first state, a round
spending: rounds on record before they are run
run_folder: configuration, choices and metrics beside the checkpoints
counted: enters runs into the registry; composes the cost of all runs on the same records
train: the loop
privacy_facts: facts of the statement, from plans and ledgers
evaluate: test metrics, report, summary
search: a private search for hyper-parameters
"""
