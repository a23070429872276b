"""12 heads at 4,096 tokens: the memory of the scores, counted and measured, and of attention without stored scores."""

import os
import subprocess
import sys

CODE = """
import resource, sys, torch, regard as rg
torch.set_num_threads(1)
q, k, v = torch.randn(3, 1, 12, 4096, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.no_grad():
    if sys.argv[1] == "by hand":
        output = (q @ k.mT / 8).softmax(-1) @ v
    else:
        output = rg.Attention()(q, k, v).output
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak(how):
    """Peak memory of a separate process in MiB, minus its inputs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return int(
        subprocess.run(
            [sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True, env=environment
        ).stdout
    )


counted = 12 * 4096**2 * 4
print(f"scores of one layer in float32: {counted:,} bytes = {counted / 1e6:.0f} MB = {counted / 2**20:.0f} MiB")
by_hand, attend = peak("by hand"), peak("attend")
print(f"measured peak, minus the inputs: {by_hand:,} MiB by the formula, {attend:,} MiB by attend")
assert by_hand > 768 and attend < 200
