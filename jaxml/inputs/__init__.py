"""Pure decoding and features shared by data preparation and serving (tokenizers today). No grain, no jax."""
