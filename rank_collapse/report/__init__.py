"""Draws figures from plain arrays, finds alarms, and writes a page of HTML."""

from rank_collapse.report.page import Section as Section, render as render
