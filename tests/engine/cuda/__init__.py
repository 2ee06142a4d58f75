"""hotspan's CUDA worker and vLLM's over a simulated CUDA runtime (kit/cuda), driven by the engine without a model."""
