"""Parts of `benchmarks/serving.py`: points, engines, the loop, results, tables, pictures."""
