"""Models: typed specs, Flax NNX modules built from them, and the free functions they are made of."""
