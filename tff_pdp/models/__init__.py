"""Models as pure functions over named weights.

base: `Model`, losses, batches on their way in
metrics: figures that models are judged by
average_precision: the figure of rankings, of tensors and of arrays
layers: layers, and initial kernels
example_gradients: each example's gradient by a weight: its norm, and sums over examples
dense: linear, regression, SVM, logistic, MLP
convolutional: CNN and LeNet
resnet: ResNet-20 with GroupNorm
hypernetwork: a network that makes a model's weights
derived: a model made of another, with weights frozen or inputs scaled
"""
