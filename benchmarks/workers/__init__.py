"""Measures rounds whose clients are computed by workers on Ray, beside the same rounds in one process.

rounds: workloads W1 and W2, described so that workers make clients' examples for themselves
run: the measurement, as ratios of rounds in one sitting
"""
