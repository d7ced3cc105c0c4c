"""Random generators inside graphs, made of elementwise operations.

chacha20: a cryptographic generator
philox: a generator that is fast
"""
