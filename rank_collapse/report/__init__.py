"""Figures from plain arrays, alarms, and a page of HTML."""

from rank_collapse.report.page import Section as Section, render as render
