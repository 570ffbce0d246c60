"""The Triton kernels, and nothing else: what launches them is beside this folder."""
