"""Command-line tools: `python -m moe_kernels {explain, tune, show, verify}`."""
