"""LeNet for small images (`lenet`), the model that hypernetworks generate for each client."""

import dataclasses
from collections.abc import Sequence

from tff_pdp.models.base import Model
from tff_pdp.models.convolutional import build_cnn


def build_lenet(
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (16, 32),
    kernel_size: int = 5,
    hidden_units: Sequence[int] = (120, 84),
    *,
    input_shift: float = 0.0,
    input_scale: float = 1.0,
) -> Model:
    """Builds convolutions, each with 2x2 max pooling and ReLU, two dense layers with ReLU, and a dense layer.

    The defaults are the target network of Shamsian et al. ("Personalized Federated Learning using Hypernetworks",
    arXiv:2103.04628, ICML 2021): LeNet-5 (LeCun et al., "Gradient-Based Learning Applied to Document Recognition",
    Proc. IEEE 1998) with more channels, ReLU and max pooling. Everything else is as in `build_cnn`, which it is a form
    of.

    Raises:
      ConfigError: a size is not positive, or the input is too small (16 x 16 is enough for the defaults).
    """
    model = build_cnn(
        input_shape,
        num_classes,
        channels,
        kernel_size,
        hidden_units,
        pool_after="each",
        input_shift=input_shift,
        input_scale=input_scale,
    )
    return dataclasses.replace(model, name="lenet")
