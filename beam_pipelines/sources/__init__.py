"""Reads each kind of raw data, and defines the settings of each kind in an experiment.

images: labelled images; single image files
partition: divides pooled examples; writes the demo's divided digits
leaf: LEAF JSON, whole or split
silo_files: `.mat`, `.json`, `.npz`; arrays that another kind has written
table: CSV and Parquet, by the schema of their columns
mnist: MNIST, MNIST by writer, EMNIST
cifar: CIFAR-10 and CIFAR-100, unpickled safely
divided: pooled images by class, Dirichlet, shards or evenly; Fashion-MNIST
rotated_mnist: MNIST in known clusters, rotated and masked
fed_emnist: TFF's Federated EMNIST, SQLite or HDF5
celeba: CelebA by person
nist: NIST SD19 by writer
"""
