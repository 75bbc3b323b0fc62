"""GPU kernels, written once in Triton for NVIDIA and AMD.

Importing this package imports triton, so only a GPU platform (or a test) does it.
"""
