"""The kernel. Imported when it is first bound."""

import torch


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def frozen_scale(x, factor=2.0):
    return _Scale.apply(x, factor)
