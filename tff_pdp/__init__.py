"""tff_pdp: personalised, differentially private federated learning on TensorFlow Federated."""

import os

# TensorFlow reads this once, when it is first imported; every module of this package is imported after this line.
# 3 silences notes about CPU features and absent GPUs; failures are Python exceptions and are not affected.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__version__ = "0.1.0"
