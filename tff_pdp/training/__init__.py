"""Training: rounds of ledger, next, checkpoint.

record: what a run spends, on disk before it is spent
client_store: clients' states from round to round
checkpoint: state, ledger, key and round as one folder
rounds: first state, a round
costs: what all runs on these records have spent
train: the loop
privacy_facts: facts of the statement, from plans and ledgers
evaluate: test metrics, report, summary
search: a private search for hyper-parameters
"""
