"""TensorRT-LLM's engine flow (1.0 to 1.2) for our models.

`tensors.py` and `convert.py` make its checkpoints, `layers.py`, `inputs.py` and `model.py` are the
model class in its own layers, `plugin_config.py` has the flags, `contract.py` lists every symbol of
the library that is used. Only the modules that say so import it.
"""
