"""Kernels for GPUs, written in Triton (Tillet et al. 2019, doi:10.1145/3315508.3329973)."""
