"""A CUDA runtime in simulation: vLLM's transfer worker and hotspan's run over it unchanged, on a machine without a GPU.

clocks.py    which accesses to a piece of memory are ordered, and which are a race
machine.py   devices with memory and streams, the hosts of their ranks, and the order in which all of it happens
streams.py   streams, events, copies and kernels
pinned.py    host memory that is registered with a driver
install.py   puts it in the place of CUDA
"""
