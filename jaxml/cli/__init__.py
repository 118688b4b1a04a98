"""The only reader of flags and environment."""
