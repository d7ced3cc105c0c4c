"""UDP-Alg and pFedHN: a hypernetwork makes every client's model from the client's descriptor.

UDP-Alg has user-level privacy (Scott et al., "Differentially Private Hypernetwork-based Federated Learning",
HyperNetFL). Without privacy the method is pFedHN (Shamsian et al., "Personalized Federated Learning using
Hypernetworks", ICML 2021).

Clients receive the hypernetwork's parameters phi. A client makes its model theta = h(v; phi) from its descriptor v,
takes local steps to theta', and releases the matching change of phi: theta' - theta, times the transposed Jacobian of h
w.r.t. phi. The descriptor moves by theta' - theta, times the transposed Jacobian of h w.r.t. v, and never leaves the
client. Descriptor and model are functions of raw data: neither is post-processing of phi alone.
"""

import dataclasses

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, Claims, ClientResult, Export, map_weights
from tff_pdp.algorithms.hyper_parameters import ADAPT_STEPS, LOCAL_TRAINING, HParam
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.errors import ConfigError
from tff_pdp.models.hypernetwork import Hypernetwork
from tff_pdp.settings import Count, CountOrZero, NotNegative, Positive

_TRUSTED_SERVER = (
    "the server keeps users' descriptors and sees their un-clipped updates: it must be trusted with both, and give the "
    "model of a descriptor to its own user alone"
)


def build_udp_hypernet(
    *,
    descriptor_size: Count = 8,
    hidden_units: tuple[Count, ...] = (100, 100, 100),
    head_scale: NotNegative = 0.1,
    hypernet_seed: CountOrZero = 1,
    fine_tune: bool = False,
    paper_server_descriptors: bool = False,
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds UDP-Alg. Server state: phi, optimizer. Client state: its descriptor. Released: phi's update, averaged.

    Guarantee: only the update of phi leaves a client. Under a user-level plan phi is private for every user, and a
      client's model is private for all other users (joint DP).
    Assumes: releases are clipped and noised, as in a user-level plan.

    Args:
      descriptor_size: number of values in a descriptor.
      hidden_units: number of units of each hidden layer of the hypernetwork.
      head_scale: relative distance of the first models from the target model's own initial weights; 0 for none.
      hypernet_seed: seed of the initial parameters and descriptor, which are public.
      fine_tune: let clients take `adapt_steps` local steps from their model before they use it.
      paper_server_descriptors: assume, as the paper does, that the server keeps the descriptors: the computation is
        unchanged, but the claim is weaker.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.

    Raises:
      ConfigError: a size is not positive, a value is out of range, or the initial models ignore the descriptor.
    """
    hypernetwork = Hypernetwork(descriptor_size, tuple(hidden_units), hypernet_seed, head_scale)
    if not hypernetwork.starts_alive():
        raise ConfigError(
            f"hypernet_seed {hypernet_seed} with hidden_units {list(hidden_units)}: no unit of the last hidden layer "
            "is active at the start, so descriptors would make no difference; take another seed, or more units"
        )
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum)

    def generate(broadcast, client_state):
        return hypernetwork.generate(broadcast["parameters"], client_state["descriptor"])

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        start = generate(broadcast, client_state)
        trained = local_sgd(start, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        moved = map_weights(tf.subtract, trained, start)
        descriptor = client_state["descriptor"]
        update, direction = hypernetwork.pull_back(broadcast["parameters"], descriptor, moved)
        state = {"descriptor": descriptor + hparams["descriptor_learning_rate"] * direction}
        return ClientResult(state=state, released={"update": update})

    def server_update(state, aggregates):
        moments, parameters = optimizer.apply(state["optimizer"], state["parameters"], aggregates["update"])
        return {"parameters": parameters, "optimizer": moments}

    def adapt(broadcast, client_state, data, grad_fn, hparams):
        start = generate(broadcast, client_state)
        return {"weights": local_sgd(start, data, grad_fn, hparams["learning_rate"], hparams["adapt_steps"])}

    def init_server(weights):
        parameters = hypernetwork.init(weights)
        return {"parameters": parameters, "optimizer": optimizer.init(parameters)}

    def global_model(state):
        # From the public descriptor that every client starts from.
        return hypernetwork.generate(state["parameters"], hypernetwork.init_descriptor())

    hparams = {
        **LOCAL_TRAINING,
        "descriptor_learning_rate": HParam(
            1.0,
            "step size of a descriptor: it moves by this times J^T d, with d the change of the model's weights and J "
            "their Jacobian by the descriptor",
        ),
    }
    return Algorithm(
        name="udp_hypernet",
        title="UDP-Alg (hypernetwork)",
        hparams={**hparams, "adapt_steps": ADAPT_STEPS} if fine_tune else hparams,
        released={"update": "mean"},
        data_passes=1,
        init_server=init_server,
        broadcast=lambda state: {"parameters": state["parameters"]},
        init_client=lambda broadcast: {"descriptor": hypernetwork.init_descriptor()},
        client_update=client_update,
        server_update=server_update,
        adapt=adapt if fine_tune else None,
        personalise=(lambda broadcast, adapted: adapted["weights"]) if fine_tune else generate,
        global_model=global_model,
        # A tuned model is not a function of the descriptor alone.
        export=Export(served_from_state=not fine_tune),
        claims=Claims(condition=_TRUSTED_SERVER if paper_server_descriptors else ""),
    )


def build_hypernet(
    *, descriptor_size: Count = 8, hidden_units: tuple[Count, ...] = (100, 100, 100), head_scale: NotNegative = 0.1
) -> Algorithm:
    """Builds pFedHN: `udp_hypernet` without privacy, with a server that adds the mean update.

    Args:
      descriptor_size: number of values in a descriptor.
      hidden_units: number of units of each hidden layer of the hypernetwork.
      head_scale: relative distance of the first models from the target model's own initial weights; 0 for none.
    """
    return dataclasses.replace(
        build_udp_hypernet(descriptor_size=descriptor_size, hidden_units=hidden_units, head_scale=head_scale),
        name="hypernet",
        title="Hypernetwork",
    )
