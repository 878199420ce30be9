"""The operations, one folder each: the reference, the version in PyTorch operations, and the Triton kernels."""
