"""The engine whose clients are computed by workers on Ray, on this machine or in a cluster.

calls: descriptions of calls, requests and answers, which cross between processes
temporary_folders: folders for temporary files, removed even if a process is killed
worker: the process of one worker
part_runner: computes parts of the clients at a worker
pool: starts and replaces workers, and divides parts among them
engine: the engine, as a TFF context
"""
