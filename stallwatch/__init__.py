"""stallwatch: tells when readers of streamed answers are being kept waiting, for how long, and why."""

__version__ = "0.1.0"
