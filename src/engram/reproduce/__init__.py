"""Reproduce the tables and figures of a paper: the runs they need, the runs that exist, our numbers and the paper's.

`paper` (experiments as data), `records` and `results_files` (measured runs), `cell_plan` (the runs of each cell),
`cost` (time that the missing runs would take), `cells` (the numbers), and the output: `paper_tables` (Markdown, CSV)
and `paper_page` (HTML, plots).
"""
