"""Functions on a whole model: convert, wiring, fold, fuse, recalibrate, and the rest of the public interface."""
