"""A model directory on disk: generations, manifest, weights, images, and changing them as a transaction."""
