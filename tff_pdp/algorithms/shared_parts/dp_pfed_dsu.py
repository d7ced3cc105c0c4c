"""DP-pFedDSU: a shared body that uses and updates only its weights of large magnitude, and a head per client.

The method is CENTAUR with two additions, named as in the paper. While the body's last layers are trained, a mask sets
all but their largest weights to zero (reparameterised training). A penalty draws the update's norm towards the clip
norm (adaptive norm regularisation).

In the paper each client masks its upload, noise included, by its own final weights. The mask is then an unprotected
function of the client's data: `mask_source="paper_client_mask"` is for comparison alone.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import tensorflow as tf
from msgspec import Meta

from tff_pdp.algorithms.base import Algorithm, Claims, map_weights, merge, split
from tff_pdp.algorithms.local_sgd import View
from tff_pdp.algorithms.partial_sharing import HEAD_THEN_BODY, build_partial_sharing, head_then_body
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.models.base import Weights
from tff_pdp.settings import Count, NotNegative, Positive


def masked_names(body: Weights, sparse_layers: int) -> list[str]:
    """Returns the names of the kernels of the body's last `sparse_layers` layers; other weights are never masked."""
    kernels = [name for name, value in body.items() if len(value.shape) >= 2]
    return kernels[len(kernels) - min(sparse_layers, len(kernels)) :]


def magnitude_masks(body: Weights, names: Sequence[str], sparsity: float) -> Weights:
    """Returns masks by name: ones at each tensor's largest weights, zeros elsewhere.

    If several weights are as large as the smallest kept weight, all of these are kept. Tensors that are not in `names`
    have ones everywhere.

    Args:
      body: weights by name, float32.
      names: names of the masked weights.
      sparsity: share of a tensor's weights that is kept, in (0, 1].
    """

    def mask(name: str, value: tf.Tensor) -> tf.Tensor:
        if name not in names:
            return tf.ones_like(value)
        sizes = tf.reshape(tf.abs(value), [-1])
        kept = math.ceil(sparsity * value.shape.num_elements() * (1 - 1e-9))
        smallest = tf.math.top_k(sizes, kept).values[-1]
        return tf.cast(tf.abs(value) >= smallest, tf.float32)

    return {name: mask(name, tf.convert_to_tensor(value)) for name, value in body.items()}


def mask_size(masks: Weights) -> int:
    """Returns the number of weights that the masks keep."""
    return sum(int(np.sum(np.asarray(mask))) for mask in masks.values())


MaskSource = Literal["server", "client", "paper_client_mask"]
_UNSOUND = (
    "the uploaded update and its noise are masked by the client's own final weights: a coordinate that no other "
    "client's mask has moves if and only if the client takes part"
)
# Keeps the penalty's gradient finite where nothing has moved.
_SMALLEST_NORM = 1e-12


def build_dp_pfed_dsu(
    *,
    head: Sequence[str],
    sparsity: Annotated[float, Meta(gt=0, le=1)] = 0.05,
    sparse_layers: Count = 4,
    mask_source: MaskSource = "server",
    mask_gradient: Literal["straight_through", "masked"] = "straight_through",
    norm_weight: NotNegative = 0.2,
    norm_target: NotNegative = 0.01,
    norm_penalty: Literal["absolute", "hinge"] = "absolute",
    local_momentum: Momentum = 0.0,
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds DP-pFedDSU. Server state: weights, optimizer. Client state: its head. Released: the body's masked update,
    averaged.

    The mask applies only while the body is trained; the paper defines no other use. Heads are tuned on the unmasked
    body, and clients' models have the unmasked body, too.

    Guarantee: with `mask_source` `server` the mask is a function of the shared body, that is, of earlier releases, and
      the same for all clients; with `client` a client masks the weights it computes with, but releases a dense update.
    Assumes: releases are clipped and noised on all coordinates, as in a user-level plan.

    Args:
      head: names of the weights that stay at each client.
      sparsity: share of a masked layer's weights that is kept.
      sparse_layers: number of layers, counted back from the end of the body, whose kernels are masked.
      mask_source: `server` masks by the shared body at the start of a round, `client` by the client's own weights at
        every step. `paper_client_mask` masks the noised upload by the client's final weights, as the paper does; the
        noise then protects nobody.
      mask_gradient: `straight_through` still updates masked weights by their gradients, `masked` leaves them unchanged.
        With `mask_source: server` the two give the same result.
      norm_weight: weight of the norm penalty, lambda; 0 for no penalty.
      norm_target: norm that the penalty draws the update towards; set it to `privacy.clip_norm`.
      norm_penalty: `absolute` penalises norms above and below the target, `hinge` only norms above.
      local_momentum: momentum of a client's steps on the body.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.

    Raises:
      ConfigError: a value is out of range.
    """

    def masks_of(body: Weights) -> Weights:
        return magnitude_masks(body, masked_names(body, sparse_layers), sparsity)

    def options(start: Weights) -> dict[str, Any]:
        fixed = masks_of(start) if mask_source == "server" else None

        def masks(body: Weights) -> Weights:
            return masks_of(body) if fixed is None else fixed

        def apply(weights: Weights) -> Weights:
            body = split(weights, head)[1]
            return merge(weights, map_weights(tf.multiply, body, masks(body)))

        def spread(gradient: Weights, weights: Weights) -> Weights:
            if mask_gradient == "straight_through":
                return gradient
            return map_weights(tf.multiply, gradient, masks(split(weights, head)[1]))

        def penalty(body: Weights) -> Weights:
            return _norm_gradient(map_weights(tf.multiply, map_weights(tf.subtract, body, start), masks(body)))

        view = View(apply, spread, trainable=list(start))
        return {"view": view, "penalty": penalty if norm_weight else None}

    def _norm_gradient(moved: Weights) -> Weights:
        norm = tf.linalg.global_norm(list(moved.values()))
        sign = tf.sign(norm - norm_target)
        if norm_penalty == "hinge":
            sign = tf.maximum(sign, 0.0)
        return map_weights(lambda value: 0.5 * norm_weight * sign * value / (norm + _SMALLEST_NORM), moved)

    def release(start: Weights, trained: Weights) -> Weights:
        moved = map_weights(tf.subtract, trained, start)
        if mask_source == "client":
            return moved
        return map_weights(tf.multiply, moved, masks_of(start if mask_source == "server" else trained))

    def receive(body: Weights, update: Weights) -> Weights:
        # The mask follows from earlier releases, so masking the noised update is post-processing.
        return map_weights(tf.multiply, update, masks_of(body)) if mask_source == "server" else update

    algorithm = build_partial_sharing(
        name="dp_pfed_dsu",
        title="DP-pFedDSU",
        head=head,
        hparams=HEAD_THEN_BODY,
        train=head_then_body(head, local_momentum, options),
        optimizer=build_server_optimizer(server_optimizer, server_learning_rate, server_momentum),
        release=release,
        receive=receive,
    )
    if mask_source == "server":
        claims = Claims(noised_size=lambda weights: mask_size(masks_of(split(weights, head)[1])))
        return dataclasses.replace(algorithm, claims=claims)
    if mask_source == "client":
        return algorithm
    return dataclasses.replace(algorithm, claims=Claims(unsound=_UNSOUND, noise_on_own_support=True))
