"""Pure algorithms from the parameters of a model to smaller ones."""
