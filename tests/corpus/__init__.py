"""Tiny models of real transformers classes, and the checks that every family has to pass."""
