"""Our own HTTP listener: metrics, probes and JSON."""
