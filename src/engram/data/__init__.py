"""Data sets, class orders, the stream of stages, the memory of exemplars, and augmentation."""
