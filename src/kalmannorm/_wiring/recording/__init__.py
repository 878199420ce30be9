"""Record one concrete run of a model: every operation, and the tensors between them."""
