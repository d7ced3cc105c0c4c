"""Training: rounds of ledger, next, checkpoint.

record: what a run spends, on disk before it is spent
client_store: clients' states from round to round
checkpoint: state, ledger, key and round as one folder
rounds: first state, a round
spending: rounds on record before they are run
run_folder: configuration, choices and metrics beside the checkpoints
counted: runs entered into the registry, and what all on the same records cost
train: the loop
privacy_facts: facts of the statement, from plans and ledgers
evaluate: test metrics, report, summary
search: a private search for hyper-parameters
"""
