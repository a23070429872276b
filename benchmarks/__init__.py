"""Speed and memory as ratios against torch, measured in one run."""
