"""Generic spec machinery that knows no stage: tagged JSON, typed overrides, suggestions, diffs. No jax."""
