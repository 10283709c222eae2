"""What is kept of the past: a timeline to look at, recordings to judge again, bundles of the minutes around a stall."""
