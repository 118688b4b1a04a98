"""From a task as data to its functions. Reads the tasks; `train.step` and `recipes` call it."""

from __future__ import annotations

from jaxml.models.spec import ExecutionSpec
from jaxml.tasks.classification import TextClassificationTask
from jaxml.tasks.contract import Task
from jaxml.tasks.language import LanguageModelingTask
from jaxml.tasks.spec import LanguageModeling, TaskSpec


def build_task(spec: TaskSpec, execution: ExecutionSpec = ExecutionSpec()) -> Task:
    """The task of a spec whose fields were checked (`recipes.checks`)."""
    if isinstance(spec, LanguageModeling):
        return LanguageModelingTask(spec, execution.logits_chunk_bytes)
    return TextClassificationTask(spec)
