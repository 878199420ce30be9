"""Propagate: carry moments through many layers at once, to compute the priors of many norms together."""
