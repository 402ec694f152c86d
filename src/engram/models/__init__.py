"""Models of your own images: a directory that learns new classes as a transaction and can be read at any time."""
