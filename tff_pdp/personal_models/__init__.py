"""Makes served models from a trained method.

trained_clients: gives access to a trained method's clients and their weights, one client after another
served: brings clients' models into the form in which they are served
model_card: records how an export was made, and checks whether settings still fit it
export: exports the models of an experiment's clients as SavedModels
new_clients: adds clients after training
"""
