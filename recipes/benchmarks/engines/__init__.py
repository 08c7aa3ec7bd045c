"""What `compare.py` is made of: workloads, the worker that runs in each engine's own interpreter, golden answers, reports."""
