"""The experiment: is it prefill? The three-run matrix, its statistics, sweeps of a server's settings, reports."""
