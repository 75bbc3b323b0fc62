"""The operators of a decoder, and which kernels carry them out."""
