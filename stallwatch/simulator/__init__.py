"""A stand-in for one vLLM server: a pure step engine, its HTTP face, and named scenarios with their true causes.

It exists so that the detectors can be tested on the phenomenon itself: tokens, counters and gaps all follow from
scheduled steps, never from drawn latencies. It imports nothing else of stallwatch, and the rest imports nothing of
its understanding of vLLM: one misreading must not be shared by both sides.
"""
