"""Contenders: one module each, run as a program by the Python of its own environment.

tf_models: the image classifiers in TensorFlow
floor_tf: the same arithmetic in bare TensorFlow
ours: tff_pdp
stock_tff: TFF as it comes
fedjax: FedJAX
pfl: pfl
"""
