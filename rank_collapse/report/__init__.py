"""Figures from plain arrays, and the self-contained HTML page that shows them."""

from rank_collapse.report.page import Comparison, Section, number, render

__all__ = [
    "Comparison",
    "Section",
    "number",
    "render",
]
