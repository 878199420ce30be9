"""Done in every forward of a converted model: priors reach norms, and running statistics are updated."""
