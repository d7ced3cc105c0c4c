"""Keras models as pure functions of named weights.

variables: a model's variables, their names, and calls with other values in their places
refusals: models that cannot be trained on single examples, each named with its layer
closed_forms: Keras layers whose gradients of single examples have a closed form
recurrent: closed forms of LSTM, GRU and SimpleRNN
masks: dropout masks in place of Keras's random numbers
convert: `from_keras`
"""
