"""Layers with any setting, their tokens and copies."""

import io
from dataclasses import fields

import torch

from moe_layers import MoEConfig, MoEFeedForward

FIELDS = frozenset(field.name for field in fields(MoEConfig))


def moe_layer(*sizes, **options):
    """Return the layer of a `MoEConfig`. Options are its fields, None for the default, and those of `from_config`."""
    settings = {name: options.pop(name) for name in FIELDS & options.keys()}
    settings = {name: value for name, value in settings.items() if value is not None}
    return MoEFeedForward.from_config(MoEConfig(*sizes, **settings), **options)


def make_x(device, shape=(3, 4, 16), seed=1, dtype=torch.float32):
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def pickled(module):
    """Return a copy of the module that was written and read by PyTorch."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
