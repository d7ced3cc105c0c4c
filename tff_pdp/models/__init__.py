"""Models as pure functions over named weights.

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
"""
