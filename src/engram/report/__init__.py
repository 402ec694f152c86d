"""The report on finished runs: one self-contained HTML page, figures as SVG, numbers as CSV."""
