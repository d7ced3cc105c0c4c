"""Kinds of raw data: a reader each, and the settings that an experiment has for it.

images: labelled images; single image files
partition: pooled examples divided; digits divided, for the demo
leaf: LEAF JSON, whole or split
silo_files: `.mat`, `.json`, `.npz`; arrays that another kind has written
mnist: MNIST, its writers, EMNIST
cifar: CIFAR-10 and CIFAR-100, unpickled safely
divided: images by class or Dirichlet; rotated and masked MNIST
fed_emnist: TFF's Federated EMNIST, SQLite or HDF5
celeba: CelebA by person
nist: NIST SD19 by writer
"""
