"""`tersekv bench`: verify, then time every operation over the cells of a grid, beside other libraries.

cases.py      Case: what is timed; grid() lists them
shapes.py     decodes in other shapes; cliffs.py: beside the plain case
random_cells.py     decodes drawn by a seed (dice.py), random_prefill.py: prefills; their mean and the worst
data.py       random caches, page tables, and their values in fp64
decode.py, append.py, prefill.py, mla_prefill.py, mla_project.py, merge_states.py, transcode.py, index.py, sparse.py
              Case → Problem: tensors, the calls to time, and the judge of what they wrote
peers.py, flashinfer.py, flashmla.py    the same work by other libraries; compat.py: and by our functions of their names
measure.py    clocks: CUDA graphs, wall, host; what the chip copies and multiplies
engine.py     judge → time → peers, one Result per case
compile_ahead.py    every cell called once by several processes, before any is timed
report.py     lines, means, JSON; plot.py: the picture
"""
