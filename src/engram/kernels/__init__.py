"""Hand-written GPU kernels, in Triton, for the residual backbones in bf16.

Only imported where there is a GPU; `fused` builds the backbone's forward and backward out of them.
"""
