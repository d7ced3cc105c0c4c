"""Runs the commands of `tff-pdp`.

experiment: prepare, train, tune, evaluate, config, export, demo, reproduce, doctor
clients: personalize and predict, for single clients
data: clients, labels and columns of data
account: the cost of a plan, before training
synthesize: synthetic data of one silo
watching: how far runs have come, runs side by side, and all that an experiment can name
whole: an experiment from its data to its export, in one command
record: `verify` checks runs on disk, `seal` destroys their secrets, `forget` removes a client
forget: removes a client from dataset, runs, exports and results
audit: what uploads reveal beyond the guarantee
demo: a whole experiment at once, from data to a server
doctor_rounds: the rounds that `doctor` computes on each engine
doctor: versions, devices, a test of every engine
"""
