"""The Python API: an experiment as an object, with results as pandas frames.

experiment: `Experiment`, from raw data to personal models
models: weights and predictions of clients' personal models
frames: pandas frames of counts, histories and results
spending: pandas frames of the privacy spent
sweep: an experiment repeated with other settings, with the privacy cost of all repetitions
"""
