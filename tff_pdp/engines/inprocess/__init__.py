"""The engine of this process: program, steps, execution, in this order.

graphs: graphs imported into the function being traced
evaluation: building blocks evaluated while tracing
program: a computation as steps, and its name across processes
stacked: graphs for one client, called for a stack
steps: the TensorFlow functions of one level
clients: which clients one call computes, on which thread
aggregations: zero, accumulate, merge, report
execution: runs a program
engine: the engine, and TFF's way into it
"""
