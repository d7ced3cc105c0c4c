"""Published experiments beside their figures.

setting: data, variants, scales, and what was published
silo_settings: experiments of the MR-MTL thesis
udp_settings: experiments of UDP-Alg
pfed_dsu_settings: experiments of DP-pFedDSU
pandemic_settings: our own experiments with contact graphs
settings: all of them by name, and our own experiment with users
jobs: one job for each variant, method, epsilon and seed
workers: worker processes, and signals to end them
run: one job in a worker
sweep: unfinished jobs on all cores; outcomes on disk
report: means over seeds against what was published, as tables
figures: the figures
reproduction: the whole of it
"""
