"""A scheduler of pytest-xdist: a worker runs whole files, and those that take longest start first.

With `--dist loadgroup` alone, each test goes to whichever worker is free. Then every worker makes the fixtures of every
file, starts every browser, and the controller counts all tests again after each of them.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling

#: Processor seconds of the files and groups that take longer than their number of tests says; rough ones will do.
SECONDS = {
    "ring": 80,  # its two processes wait for turns of the processor
    "tests/engine/test_flex.py": 75,
    "tests/project/test_pages.py": 65,
    "tests/diagnosis/test_likeness.py": 63,
    "tests/laws/test_mask_laws.py": 63,
    "tests/diagnosis/test_check.py": 60,
    "tests/laws/test_laws.py": 50,
    "tests/laws/test_accelerator.py": 45,
    "tests/front/test_types.py": 40,
    "tests/cli/test_exercises.py": 33,
    "tests/viewer/test_page_access.py": 32,
    "tests/maps/test_map_tensors.py": 31,
    "tests/hf/test_compiled.py": 26,
    "tests/viewer/test_page_browser.py": 25,
    "tests/lab/test_training_processes.py": 24,
    "tests/lab/test_report.py": 24,
    "tests/viewer/test_page_heads.py": 24,
    "tests/engine/test_kernel_processes.py": 23,
    "tests/viewer/test_page_faults.py": 23,
    "wheel": 20,
    "tests/viewer/test_page_first.py": 19,
    "tests/lab/test_training_resume.py": 18,
    "tests/laws/test_transforms.py": 17,
    "tests/viewer/test_page_live.py": 17,
    "tests/laws/test_gradients_of_calls.py": 16,
    "tests/hf/test_layer_numbers.py": 16,
    "tests/viewer/test_page_numbers.py": 16,
    "tests/project/test_gpu_benchmark.py": 15,
    "tests/project/test_tutorial_rows.py": 15,
    "tests/edits/test_edit_batches.py": 15,
    "tests/cli/test_cli.py": 15,
}


class FileScheduling(LoadGroupScheduling):
    """A unit of work is a file, or a group that tests are marked with."""

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=lambda scope: SECONDS.get(scope, 0.04 * len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
