"""The modules that a decoder is put together from."""
