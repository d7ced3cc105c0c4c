"""DP-pFedDSU: a shared body of which only weights of large magnitude are used and updated, and heads of clients' own.

As CENTAUR, with two additions (named after the paper's): the body's last layers are seen through a mask of their
largest weights while they are trained (reparameterised training), and a penalty draws the length of the update towards
the clip norm (adaptive norm regularisation).

The paper has each client mask its upload, noise included, by its own final weights. Which coordinates are masked is
then a function of the client's data that nothing protects: `mask_source="paper_client_mask"`, for comparison alone.
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
    """Names of the kernels of the body's last layers, counted from its end; other weights are never masked."""
    kernels = [name for name, value in body.items() if len(value.shape) >= 2]
    return kernels[len(kernels) - min(sparse_layers, len(kernels)) :]


def magnitude_masks(body: Weights, names: Sequence[str], sparsity: float) -> Weights:
    """Ones where a weight is among the share `sparsity` of largest magnitude in its tensor, zeros elsewhere.

    Equal magnitudes at the border are all in. Weights without a name in `names` have ones everywhere.

    Args:
      body: by name, float32.
      names: of the masked ones.
      sparsity: in (0, 1], the share that is kept.
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
    """How many weights the masks keep."""
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

    The mask is there while the body is trained, which is all that the paper defines it for; heads are tuned on the
    whole body, and models use it.

    Guarantee: with `mask_source` `server` the mask is a function of the shared body, so of earlier releases, and the
      same for all clients; with `client` a client masks what it computes with, and releases a dense update.
    Assumes: what is released is clipped and noised on all coordinates, as a user-level plan does.

    Args:
      head: names of the weights that clients keep.
      sparsity: share of a masked layer's weights that is kept.
      sparse_layers: how many layers are masked, from the body's end; of each the kernel.
      mask_source: `server` masks by the shared body at the start of a round, `client` by the client's own weights at
        every step; `paper_client_mask` as the paper, which protects nobody.
      mask_gradient: `straight_through` lets the gradient by a masked weight change it; `masked` freezes it. With
        `mask_source` `server` it makes no difference: what the mask leaves out is neither seen nor released.
      norm_weight: of the penalty, lambda; 0 for none.
      norm_target: the norm that the penalty draws the update to: the clip norm.
      norm_penalty: `absolute` draws from both sides, `hinge` only from above.
      local_momentum: of a client's steps on the body.
      server_optimizer: `sgd`, `momentum` or `adam`.
      server_learning_rate: of the server.
      server_momentum: of `momentum` and `adam`.

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
        # Noise outside the mask says nothing of anyone: this is post-processing.
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
