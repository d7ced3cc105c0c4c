"""Engines: how a TFF computation is executed.

structures: nested values and their flat lists of tensors
client_values: one value per client, stacked or one by one
base: what every engine offers; devices by name
worker: the C++ worker as a child that never outlives us
native: the stock worker as an engine
inprocess: the engine of this process
running: `running_engine(name)`, the way in
"""
