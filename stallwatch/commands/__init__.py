"""Commands that a person runs once and reads: what they gather, what that means, how it is shown, each in its own file.

They use the sources as `run` does, so that what they say of a server is what the sidecar will meet.
"""
