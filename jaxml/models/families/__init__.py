"""Models that others published: one file a family, with the spec of its config.json and the names of its tensors."""
