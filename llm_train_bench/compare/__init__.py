"""Runs side by side: records, readers of results and logs, ratios, reports, the gate."""
