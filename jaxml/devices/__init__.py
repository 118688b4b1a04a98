"""Meshes, logical axes to shardings, chip facts and process start-up."""
