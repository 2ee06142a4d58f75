"""hotspan: serve large language models on vLLM and compute a long text once."""

__version__ = "0.1.0"
