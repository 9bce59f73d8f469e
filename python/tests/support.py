"""What the tests share: random numbers, bars, and a check of refusals."""

import unittest

import numpy as np
import weft

BACKENDS = ("cpu", "reference")
SMALL_BAR = 2e-6  # results of a bounded number of f32 operations: cases/bars.h has the derivations
ATTENTION_BAR = 1e-5  # f32 attention
INTEGER_BAR = 1e-3  # exact_scores: q and the weights carry 15 bits each


def delta_bar(tokens):
    """f32 arithmetic with f32 states: 2e-6 sqrt(T)."""
    return SMALL_BAR * max(tokens, 1) ** 0.5


def relative_rms(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return np.sqrt(((got - wanted) ** 2).sum() / max((wanted**2).sum(), 1e-300))


class Case(unittest.TestCase):
    def setUp(self):
        self.random = np.random.default_rng(20)

    def normal(self, *sizes):
        return self.random.standard_normal(sizes).astype(np.float32)

    def uniform(self, low, high, *sizes):
        return self.random.uniform(low, high, sizes).astype(np.float32)

    def assert_close(self, got, wanted, bar, what=""):
        error = relative_rms(got, wanted)
        self.assertLessEqual(error, bar, what)

    def assert_refused(self, wanted, argument, function, **arguments):
        """The call raises a weft.Error whose sentence begins with the op, names the argument and holds the given words."""
        with self.assertRaises(weft.Error) as caught:
            function(**arguments)
        error = caught.exception
        self.assertEqual(error.argument, argument, error)
        self.assertIn(wanted, error.message)
        self.assertTrue(error.message.startswith(error.op + ": "), error)
