"""What mixture-of-experts problems are: dimensions, schemes, routings, activations, shape rules and costs.

This package depends on torch alone. It launches nothing, imports no kernel and needs no GPU.
"""
