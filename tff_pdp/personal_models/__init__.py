"""Makes served models from a trained method.

trained_clients: reads the states and weights of a trained method's clients, some clients at a time
served: converts clients' models to the form that is served
model_card: records how an export was made, and checks whether settings still fit it
example_request: clients and models in requests, and a request to try a server with
export: exports the models of an experiment's clients as SavedModels
new_clients: adds clients after training
"""
