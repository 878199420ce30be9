"""What happens in every forward of a converted model: priors reach norms, and statistics are tracked."""
