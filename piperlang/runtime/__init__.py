"""Runs graphs and plans."""

import os

# On ARM, oneDNN would leave /tmp/perf-PID.map for a profiler, in every process that computes.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
