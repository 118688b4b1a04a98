"""Precision: the policy of dtypes, the loss scale of float16, and products in float8."""
