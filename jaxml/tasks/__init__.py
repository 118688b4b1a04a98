"""What a batch means: loss terms, exact metric sums and predictions, as pure functions over a model. No optax."""
