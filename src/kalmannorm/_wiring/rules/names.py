"""Lists of torch functions of one kind, by the names from `records.function_name`."""

from __future__ import annotations

SAME = {
    "contiguous", "clone", "to", "type", "type_as", "float", "half", "bfloat16", "double", "cpu", "cuda", "detach",
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "requires_grad", "data", "identity", "pin_memory", "nan_to_num", "as_tensor", "asarray", "tensor", "new_tensor",
}  # fmt: skip
"""Every element stays the same and in its place, in expectation."""

REARRANGEMENTS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis",
    "squeeze", "unsqueeze", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "select",
    "getitem", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "roll", "flip", "rot90", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "cat", "concat", "concatenate", "stack", "hstack",
    "vstack", "dstack", "view_as", "reshape_as", "T", "mT", "t", "H", "mH", "index_select", "take_along_dim",
    "gather", "broadcast_to", "diagonal", "atleast_1d", "atleast_2d", "atleast_3d", "ravel",
}  # fmt: skip
"""Elements are only rearranged: the same function runs on the labels."""

POOLS = {
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices", "lp_pool1d", "lp_pool2d",
    "fractional_max_pool2d", "interpolate", "upsample", "upsample_nearest", "upsample_bilinear", "max_unpool2d",
    "grid_sample", "blur_pool2d",
}  # fmt: skip
"""Combine or repeat neighbouring positions of one channel. Channels are not mixed."""

MEANS = {"mean", "sum", "amax", "amin", "max", "min"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
LAYERS = CONVOLUTIONS | TRANSPOSED | {"linear"}
OTHER_NORMS = {"layer_norm", "group_norm", "instance_norm", "rms_norm", "batch_norm"}
SUMS = {"add", "sub", "rsub"}
PRODUCTS = {"mul", "multiply"}
QUOTIENTS = {"div", "divide", "true_divide"}
