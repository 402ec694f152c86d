"""A paper's tables and figures by name: which runs they need, which are there, and ours beside the published numbers.

The order of things: `paper` (experiments as data), `records` and `store` (measured runs), `plan` (what each cell needs
and has), `cost` (what the rest would take), `cells` (the numbers), and what shows them: `text`, `page`, `document`.
"""
