"""Contenders: each is a module that the Python of its own environment runs as a program.

tf_models: the image classifiers in TensorFlow
floor_tf: the same arithmetic in bare TensorFlow
ours: tff_pdp
stock_tff: TFF unchanged
fedjax: FedJAX
pfl: pfl
"""
