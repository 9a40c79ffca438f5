"""Runs side by side: records, readers of results and foreign logs, ratios, reports, the gate."""
