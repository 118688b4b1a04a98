"""Records, their order, packing, mixing and batches. The gateway to Grain. No jax."""
