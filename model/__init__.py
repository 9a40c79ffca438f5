"""GPT-2 and Llama-family language models: shapes, modules, loss and Hugging Face weights.

The package knows nothing of the machinery around it. `model.config` needs no torch, so that tools
which only read shapes start at once; import the rest from its own module.
"""
