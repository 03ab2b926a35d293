"""Writes the report: tables, `report.html` (one file that needs no network), and PNG plots.

`time_lines` and `stall_map` turn an analysis into series, `charts` lays them out for plotly, and
`report_page` writes the HTML around them and escapes all text.
"""
