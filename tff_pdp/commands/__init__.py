"""Commands of `tff-pdp`, and what each does.

experiment: prepare, train, tune, evaluate, export, personalize, serve, predict
account: what a plan costs, before training
demo: the demo
doctor: versions, devices, a test of every engine
"""
