"""Depth parametrisations: a deeper network's gains, rates and decay from those of a small one."""

from rank_collapse.training.depth_rules import DepthRule as DepthRule, depth_rule as depth_rule
