"""Sealed checkpoints: manifest and arrays. The gateway to Orbax."""
