"""Bindings to other libraries. A module that imports one is not imported by ``import moe_ops``."""
