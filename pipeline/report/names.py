"""The names of a report's files, and its colours, for cards and previews, which draw nothing themselves."""

PAGE_NAME = "report.html"
RATIO_NAME = "ratio.png"
PLOT_TITLES = {
    "throughput.png": "Output throughput against M",
    RATIO_NAME: "Throughput ratio against M, with confidence intervals and the floor",
    "tpot.png": "Time per output token against M",
    "ttft.png": "Time to first token against M",
}
BADGE_NAME = "badge.svg"
REPORT_NAMES = (*PLOT_TITLES, PAGE_NAME, BADGE_NAME)
"""The files of a whole report."""

ARTIFACT_COLOUR = "#0b6e99"
BASELINE_COLOUR = "#8a8a8a"
RIVAL_COLOUR = "#c77700"
FLOOR_COLOUR = "#b3261e"
