"""The contract between methods and the engine: what a method declares, and what it may ask for."""
