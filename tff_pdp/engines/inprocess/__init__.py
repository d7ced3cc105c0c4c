"""The engine inside this process: a computation becomes a program, then steps, which are executed.

graphs: graphs imported into the function being traced
evaluation: building blocks evaluated while tracing
program: a computation as levels of statements, and its fingerprint
stacked: graphs for one client, called for a stack of clients
steps: the TensorFlow functions of one level
parts: division of clients into parts, and the tree in which the parts' sums are merged
clients: calls on parts, side by side
aggregations: sums over clients, by the steps zero, accumulate, merge and report
execution: runs a program
engine: the engine, as a TFF context
"""
