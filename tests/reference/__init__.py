"""Plain NumPy references, written from the papers and not from the code under test."""
