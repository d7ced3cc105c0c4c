"""How far figures that were printed, or solved for, may lie from what an accountant gives."""

import numpy as np

from tests.rounding import gamma, half_a_digit

# Of a calibrated noise: it aims 1e-6 below epsilon, finds the noise's logarithm to 1e-5 and errs to the safe side.
CALIBRATED = 3e-5


def by_noise(figure):
    """How far epsilon may be off, relative, as the noise was printed: it falls with its third power at most.

    So it does at a noise of one, where RDP has exp(1 / z^2) - 1; at much noise it is the second power.
    """
    return 3 * half_a_digit(figure) / float(figure)


def by_coarser_orders(figure):
    """How small a figure may come out where orders are finer than those that it was computed with.

    The library's, in steps of a tenth, miss a best order near 1.2 by up to 0.05, and so up to (0.05 / 0.2)^2 of what
    falls with the order; that is a sixth of epsilon or less where it is some hundred.
    """
    return float(figure) - half_a_digit(figure) - (0.05 / 0.2) ** 2 / 6 * float(figure)


def by_transforms(steps, delta):
    """How far two compositions of so many steps may be apart that take Fourier transforms of up to 2^20 values.

    Powers of a transform round a probability of one by so much, and an epsilon moves by less than twice its share of
    delta.
    """
    return 2 * gamma(steps * 2 * 20, np.float64) / delta
