"""Runs the commands of `tff-pdp`.

experiment: prepare, train, tune, evaluate, export, personalize, serve, predict
account: the cost of a plan, before training
record: `verify` checks runs on disk, `seal` destroys their secrets
demo: the demo
doctor: versions, devices, a test of every engine
"""
