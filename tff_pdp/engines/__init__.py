"""Engines, which execute TFF computations.

structures: nested values and their flat lists of tensors
client_values: one value per client, stacked or one by one
far_values: values that stay at workers, by a description
base: the interface of every engine
devices: devices by name, and which bits a GPU repeats
worker: the C++ worker as a child process, which ends with its parent
native: TFF's C++ worker as an engine
inprocess: the engine inside this process
ray_workers: the same engine, with clients at workers on Ray
running: `running_engine(name)`, which starts an engine
"""
