"""Bindings to other libraries; each module imports its library, so none is imported by ``import moe_ops``."""
