"""The operations, one folder each: the naive truth, the version in PyTorch operations, and the Triton kernels."""
