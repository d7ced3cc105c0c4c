"""Methods whose clients share a part of their models.

fed_per: body and head, trained together
centaur: head, then body
dp_pfed_dsu: only body weights of large magnitude
dp_fed_avg_ft: a shared model with heads tuned after training
pp_sgd: a shared model, and a personal addition to its head
udp_hypernet: a hypernetwork that makes every client's model
"""
