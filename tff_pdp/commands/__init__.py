"""Commands of `tff-pdp`, and what each does.

experiment: prepare, train, tune, evaluate, export, personalize, serve, predict
account: what a plan costs, before training
record: verify and seal: what lies on disk of runs is checked, or its secrets are destroyed
demo: the demo
doctor: versions, devices, a test of every engine
"""
