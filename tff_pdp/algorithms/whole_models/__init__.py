"""Methods whose clients own a whole model, or share one.

local_only: everyone alone
fed_avg: FedAvg
finetune: FedAvg, then everyone alone
mr_mtl: a pull to the mean of all models
ditto: a shared model, and an own one pulled to it
mocha: models pulled to each other
ifca: models of clusters, and what may follow them
"""
