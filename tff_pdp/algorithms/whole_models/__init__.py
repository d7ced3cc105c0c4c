"""Methods whose clients own a whole model, or share one.

fed_avg: FedAvg
finetune: local training, from the start or after FedAvg
mr_mtl: a pull to the mean of all models
ditto: a shared model, and a model per client pulled to it
mocha: models pulled to each other
apfl: a shared model, mixed with a model per client
pfedme: a model per client, pulled to a shared model, which follows the clients' models
fed_nova: FedAvg of updates divided by the number of steps
fed_prox: FedAvg with a pull to the shared weights in local steps
scaffold: FedAvg with corrections of local steps by controls
pfa: FedAvg whose noisy updates are projected into the space of those with little noise
public_only: FedAvg of the updates with little noise
ifca: a model per cluster, and methods that start with IFCA's clusters
"""
