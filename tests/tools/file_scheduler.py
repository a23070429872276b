"""A scheduler of pytest-xdist: a worker runs whole files, and those that take longest start first.

With `--dist loadgroup` alone, each test goes to whichever worker is free. Then every worker makes the fixtures of every
file, starts every browser, and the controller counts all tests again after each of them.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling

#: Seconds of the files and groups that take longer than their number of tests says, on two cores; rough ones will do.
#: The ring waits for turns of the processor, so its processes take minutes beside two busy workers: it starts first.
SECONDS = {
    "ring": 400,
    "tests/project/test_pages.py": 170,
    "tests/laws/test_laws.py": 100,
    "tests/laws/test_mask_laws.py": 90,
    "tests/diagnosis/test_check.py": 80,
    "tests/engine/test_flex.py": 80,
    "tests/diagnosis/test_likeness.py": 75,
    "tests/lab/test_training_processes.py": 66,
    "tests/project/test_machines.py": 60,
    "tests/engine/test_kernel_processes.py": 50,
    "tests/laws/test_accelerator.py": 45,
    "tests/project/test_docs.py": 40,
    "tests/front/test_types.py": 40,
    "tests/lab/test_report.py": 35,
    "tests/viewer/test_page_browser.py": 35,
    "tests/viewer/test_page.py": 30,
    "tests/viewer/test_page_heads.py": 30,
    "tests/viewer/test_page_picture.py": 30,
    "tests/laws/test_transforms.py": 25,
    "tests/viewer/test_page_access.py": 25,
    "tests/viewer/test_page_faults.py": 25,
    "tests/lab/test_training_ranks.py": 25,
    "tests/hf/test_compiled.py": 25,
    "tests/maps/test_map_tensors.py": 25,
    "tests/laws/test_combinations.py": 20,
    "tests/base/test_junk_calls.py": 20,
    "tests/base/test_extras.py": 20,
    "wheel": 20,
    "tests/engine/test_kernel_chosen.py": 15,
    "tests/engine/test_kernel_library.py": 15,
    "tests/laws/test_long_combinations.py": 15,
    "tests/engine/test_kernel_folds.py": 15,
}


class FileScheduling(LoadGroupScheduling):
    """A unit of work is a file, or a group that tests are marked with."""

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=lambda scope: SECONDS.get(scope, 0.04 * len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
