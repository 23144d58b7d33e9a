# SPDX-License-Identifier: Apache-2.0
"""Tasks of `eval tasks`: a file for each family, a line here for each file."""

from benchmarks.tasks import key_value, needle, perplexity, ruler
from benchmarks.tasks.task import Task

FAMILIES: dict[str, tuple[Task, ...]] = {
    "needles": needle.TASKS,
    "ruler": ruler.TASKS,
    "key_value": key_value.TASKS,
    "perplexity": perplexity.TASKS,
}

TASKS = {task.name: task for tasks in FAMILIES.values() for task in tasks}
