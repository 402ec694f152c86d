"""`engram serve`: models over HTTP, for the page in `page/` and for programs."""
