"""`trtllm-treewy bench serve`: a load of many requests, and what it measures."""
