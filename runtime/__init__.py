"""What runs a model: engine, scheduler, state, caches, drafters.

Installs as `trtllm_treewy.runtime`.
"""
