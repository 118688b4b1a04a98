"""Several processes on one machine, and what a scheduler's environment says about several machines."""
