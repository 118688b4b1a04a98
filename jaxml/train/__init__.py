"""Optimizer, state, the pure `train_step`, the guard, and the loop that yields events. The gateway to Optax."""
