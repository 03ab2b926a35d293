"""The report as people look at it: `report.html`, one file that needs no network, and PNG plots.

`time_lines` and `stall_map` turn an analysis into series, `charts` lays them out for plotly,
`report_page` writes the HTML around them and escapes all that it did not make up itself.
"""
