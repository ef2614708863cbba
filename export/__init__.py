"""Checkpoint reading; export to engines builds on it.

Installs as `trtllm_treewy.export`.
"""
