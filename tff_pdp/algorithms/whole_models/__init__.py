"""Methods whose clients own a whole model, or share one.

fed_avg: FedAvg
finetune: everyone alone, from the start or after FedAvg
mr_mtl: a pull to the mean of all models
ditto: a shared model, and an own one pulled to it
mocha: models pulled to each other
apfl: a shared model, mixed with an own one
pfedme: a shared model that follows the clients' own, each pulled to it
fed_nova: FedAvg of updates divided by their numbers of steps
ifca: models of clusters, and what may follow them
"""
