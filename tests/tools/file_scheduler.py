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
    "tests/laws/test_mask_laws.py": 63,
    "tests/project/test_pages.py": 60,
    "tests/lab/test_training_resume.py": 53,
    "tests/laws/test_laws.py": 50,
    "tests/diagnosis/test_likeness.py": 48,
    "tests/diagnosis/test_check.py": 45,
    "tests/laws/test_accelerator.py": 45,
    "tests/viewer/test_page_access.py": 42,
    "tests/lab/test_report.py": 35,
    "tests/maps/test_map_tensors.py": 31,
    "tests/viewer/test_page_browser.py": 31,
    "tests/viewer/test_page_heads.py": 27,
    "tests/hf/test_compiled.py": 24,
    "tests/viewer/test_page_first.py": 24,
    "tests/engine/test_kernel_processes.py": 23,
    "tests/lab/test_training_processes.py": 22,
    "tests/viewer/test_page_faults.py": 21,
    "tests/cli/test_cli.py": 21,
    "wheel": 20,
    "tests/front/test_public.py": 20,
    "tests/viewer/test_page_figures.py": 20,
    "tests/laws/test_transforms.py": 17,
    "tests/drawing/test_paper_figure.py": 17,
    "tests/laws/test_gradients_of_calls.py": 16,
    "tests/viewer/test_page_live.py": 15,
    "tests/edits/test_edit_batches.py": 15,
    "tests/cli/test_exercises.py": 13,
    "tests/project/test_gpu_benchmark.py": 13,
    "tests/hf/test_watch_compiled.py": 13,
    "tests/front/test_types.py": 12,
    "tests/project/test_tutorial_rows.py": 12,
    "tests/viewer/test_page_numbers.py": 11,
    "tests/hf/test_layer_numbers.py": 8,
}


class FileScheduling(LoadGroupScheduling):
    """A unit of work is a file, or a group that tests are marked with."""

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=lambda scope: SECONDS.get(scope, 0.04 * len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
