"""Methods that train a shared start, from which a few local steps lead to a model of the client's own.

meta_gradient: what a client releases: the gradient at the end of its steps, or through the steps
fed_meta: FedMeta, MAML and Reptile
pppfl: FedMeta from an average of the shared weights and the client's last model, with cycles of the server's rate
"""
