"""From a trained method to served models.

trained_clients: a trained method's clients, weights one after another
served: what clients share held once, the rest as rows
model_card: how an export was made, and whether settings still fit
export: SavedModels of an experiment's clients
new_clients: clients added after training
"""
