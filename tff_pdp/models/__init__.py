"""Models as pure functions over named weights; `from_keras` makes one of a Keras model.

dropout: dropout masks of each example, from keys
base: `Model`, losses, preparation of batches
metrics: accuracy, squared error, and metrics of rankings
average_precision: the metric of rankings, for tensors and for arrays
layers: layers, and initial kernels
example_gradients: norms and weighted sums of examples' gradients w.r.t. one weight
dense: linear, regression, SVM, logistic, MLP
convolutional: CNN, LeNet, the CNN of TensorFlow Privacy's tutorial
text: mean of token embeddings, then dense layers
resnet: ResNet-20 with GroupNorm
hypernetwork: a network that generates a model's weights
derived: a model made from another model, with frozen weights or scaled inputs
losses: losses and metrics that a configuration chooses by name
independence: checks that examples do not influence each other
keras: Keras models as pure functions
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tff_pdp.models.keras.convert import from_keras

__all__ = ["from_keras"]


def __getattr__(name: str) -> Any:
    # Only those who use Keras pay for its import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tff_pdp.models.keras import convert

    return convert.from_keras
