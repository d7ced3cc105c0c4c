"""Trackers: what a training shows of itself to tools such as TensorBoard, round by round.

base: the protocol of a tracker, and the facts that a tracker is given
tensorboard: event files for TensorBoard
mlflow: runs in an MLflow store, by default files
wandb: runs at Weights & Biases
"""
