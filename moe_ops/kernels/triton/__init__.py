"""Triton kernels and their launchers: allocate, launch on a grid made from shapes, return. Nothing here synchronises.

Launchers trust their arguments: `meta/shapes.py` validated them. Import the submodule that you need; importing this
package alone does not import Triton.
"""
