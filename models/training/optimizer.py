"""Muon for the matrices inside the layers (momentum made orthogonal), AdamW for everything else."""

import torch


def orthogonal(x):
    """The nearest half-orthogonal matrices to x [n, rows, cols], roughly: five Newton-Schulz steps in bf16."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    """Steps all blocks of one shape together. A block is a range of rows of a weight with a meaning of its own."""

    def __init__(self, weights, lr, decay, momentum=0.95):
        """weights: (parameter, row counts of its blocks) pairs."""
        self.lr, self.decay, self.momentum = lr, decay, momentum
        self.groups = {}
        for weight, rows in weights:
            start = 0
            for count in rows:
                span = slice(start, start + count)
                self.groups.setdefault((count, weight.shape[1]), []).append((weight, span))
                start += count
            assert start == len(weight)
        self.averages = {
            shape: torch.zeros(len(members), *shape, device=members[0][0].device)
            for shape, members in self.groups.items()
        }

    @torch.no_grad()
    def step(self, scale, momentum):
        for shape, members in self.groups.items():
            grad = torch.stack([weight.grad[span] for weight, span in members])
            average = self.averages[shape].lerp_(grad, 1 - momentum)
            update = orthogonal(grad.lerp(average, momentum)).float()
            size = max(1.0, shape[0] / shape[1]) ** 0.5
            blocks = [weight[span] for weight, span in members]
            torch._foreach_mul_(blocks, 1 - self.lr * scale * self.decay)
            torch._foreach_add_(blocks, list(update.unbind()), alpha=-self.lr * scale * size)


class Optimizer:
    """Both together, under one schedule factor."""

    def __init__(self, model, kind, matrix_lr, matrix_decay, other_lr):
        cfg = model.config
        keys = cfg.linear_num_key_heads * cfg.linear_key_head_dim
        values = cfg.linear_num_value_heads * cfg.linear_value_head_dim
        matrices, tables, vectors = [], [], []
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                tables.append(weight)
            elif weight.dim() == 2 and min(weight.shape) >= 16:
                rows = [keys, keys, values] if "in_proj_qkv" in name else [len(weight)]
                matrices.append((weight, rows))
            else:
                vectors.append(weight)
        groups = [
            {"params": tables, "lr": other_lr, "weight_decay": 0.01},
            {"params": vectors, "lr": other_lr, "weight_decay": 0.0},
        ]
        self.muon = None
        if kind == "muon":
            self.muon = Muon(matrices, matrix_lr, matrix_decay)
        else:
            groups.append({"params": [m for m, _ in matrices], "lr": matrix_lr, "weight_decay": matrix_decay})
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.97), eps=1e-9, fused=fused)
        self.peak = [group["lr"] for group in self.adam.param_groups]
        self.weights = list(model.parameters())
        self.steps = 0

    def step(self, scale):
        self.steps += 1
        for group, peak in zip(self.adam.param_groups, self.peak):
            group["lr"] = peak * scale
        self.adam.step()
        if self.muon:
            warm = min(1.0, self.steps / 300)
            self.muon.step(scale, 0.85 + (self.muon.momentum - 0.85) * warm)
        for weight in self.weights:
            weight.grad = None
