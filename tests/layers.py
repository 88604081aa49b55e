"""Layers with any setting."""

from dataclasses import fields

from moe_layers import MoEConfig, MoEFeedForward

FIELDS = frozenset(field.name for field in fields(MoEConfig))


def moe_layer(*sizes, **options):
    """The layer of a `MoEConfig`; the options are its fields (None: the default) and arguments of `from_config`."""
    settings = {name: options.pop(name) for name in FIELDS & options.keys()}
    settings = {name: value for name, value in settings.items() if value is not None}
    return MoEFeedForward.from_config(MoEConfig(*sizes, **settings), **options)
