"""weft.KvCache in memory of torch has the bits of the same cache in memory of numpy; on a GPU it agrees with the cpu."""

import copy
import pickle
import unittest

import torch

import weft


class TorchCaches(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        self.k, self.v, self.q = (torch.randn(2, tokens, heads, 64) for tokens, heads in ((100, 2), (100, 2), (3, 4)))

    def attend(self, recipe: str, arrays: tuple, like) -> object:
        cache = weft.KvCache(recipe, heads=2, head_dim=64, capacity=128, batch=2, like=like)
        cache.encode(*arrays[:2])
        return cache.attend(arrays[2])

    def test_cpu(self) -> None:
        for recipe in ("f32", "f16", "bf16", "8v4", "4v4"):
            tensors = self.k, self.v, self.q
            o = self.attend(recipe, tensors, like=self.k)
            self.assertIsInstance(o, torch.Tensor)
            self.assertTrue((o.numpy() == self.attend(recipe, tuple(each.numpy() for each in tensors), None)).all(), recipe)

    def test_bf16(self) -> None:
        o = self.attend("bf16", (self.k.bfloat16(), self.v.bfloat16(), self.q.bfloat16()), like=self.k)
        self.assertEqual((o.dtype, o.shape), (torch.bfloat16, self.q.shape))

    def test_copies(self) -> None:
        cache = weft.KvCache("8v4", heads=2, head_dim=64, capacity=128, batch=2, like=self.k)
        cache.encode(self.k, self.v)
        wanted = cache.attend(self.q)
        for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            self.assertTrue((made.attend(self.q) == wanted).all())
            self.assertNotEqual(made._sides["k"]["codes"].data_ptr(), cache._sides["k"]["codes"].data_ptr())

    @unittest.skipUnless(torch.cuda.is_available(), "torch finds no GPU")
    def test_cuda(self) -> None:
        for recipe in ("f16", "8v4", "4v4"):
            on_gpu = tuple(each.cuda() for each in (self.k, self.v, self.q))
            o, wanted = self.attend(recipe, on_gpu, like=on_gpu[0]), self.attend(recipe, (self.k, self.v, self.q), like=self.k)
            self.assertEqual(o.device, on_gpu[0].device)
            error = (o.cpu() - wanted).norm() / wanted.norm()
            self.assertLess(float(error), 2e-3, recipe)  # each side has the bar 1e-3 of scores with 15 bits


if __name__ == "__main__":
    unittest.main()
