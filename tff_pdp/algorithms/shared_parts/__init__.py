"""Methods whose clients share a part of their models.

fed_per: body and head trained together
centaur: head, then body
dp_pfed_dsu: only body weights of large magnitude
dp_fed_avg_ft: heads tuned in the end
pp_sgd: what clients add to a shared model
udp_hypernet: a hypernetwork makes every client's model
"""
