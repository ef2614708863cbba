"""Parts of `benchmarks/kernels.py`, which says how times are taken.

Free of torch: `cases` (what is measured), `floors` (bytes and operations), `results` (rows and
their JSON), `recorded` (peers' times of other runs), `goals`, `report`, `plot`.
With torch: `clock` (graphs, slots, rates), `layer` (buffers), `check` (against the reference),
`bench` (what measurements share), `machine`, and what is measured: `verification`, `commits`,
`commit_inputs`, `deferred`, `convolution`, `prompts`, `acceptance`, `peers`.
"""
