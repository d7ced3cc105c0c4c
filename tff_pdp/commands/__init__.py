"""Runs the commands of `tff-pdp`.

experiment: prepare, train, tune, evaluate, export, personalize, serve, predict
data: clients, labels and columns of data
account: the cost of a plan, before training
synthesize: synthetic data of one silo
record: `verify` checks runs on disk, `seal` destroys their secrets
audit: what uploads reveal beyond the guarantee
demo: a whole experiment at once, from data to a server
doctor_rounds: the rounds that `doctor` computes on each engine
doctor: versions, devices, a test of every engine
"""
