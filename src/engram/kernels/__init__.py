"""Hand-written GPU kernels in Triton: residual backbones, heads, losses, augmentation, update."""
