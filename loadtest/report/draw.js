"use strict";
for (const chart of JSON.parse(document.getElementById("charts").textContent)) {
  Plotly.newPlot(chart.name, chart.traces, chart.layout, { responsive: true, displaylogo: false });
}
document.body.dataset.drawn = "yes";
