"""Image files to pixels: one file, many files ahead of use, worker processes."""
