"""`python -m cake_gdn_det bench`: the operator and others beside it, measured in one run on one device.

shapes.py: what is measured, and its inputs; peers.py: the rules; floors.py: what no rule can be faster than;
reference.py: float64; timing.py: clocks, CUDA graphs, memory; measure.py: one shape, all rules; results.py: what a
run leaves; statistics.py: its summary; report.py, plots.py: for people; stages.py: the operator's own stages; cli.py:
a run.
"""
