"""Turns a trained method into served models.

trained_clients: a trained method's clients, with weights one client after another
served: weights that clients share held once, other weights as rows
model_card: how an export was made, and whether settings still fit
export: SavedModels of an experiment's clients
new_clients: clients added after training
"""
