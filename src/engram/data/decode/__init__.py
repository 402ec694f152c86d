"""Decoding of image files: one image, batches ahead of use, worker processes."""
