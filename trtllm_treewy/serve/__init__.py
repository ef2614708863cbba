"""The OpenAI-compatible server of `trtllm-treewy serve`. Needs the extra `serve`."""
