"""Nouns that cross a boundary: tags, groups, batches, plans, fates. No ray, no torch."""

from asyncrl.engine.records.batch_meta import BatchMeta
from asyncrl.engine.records.group import GroupMeta
from asyncrl.engine.records.plan import MicroBatch, Plan
from asyncrl.engine.records.prompt import Grant, Prompt, PromptStream

__all__ = ["BatchMeta", "Grant", "GroupMeta", "MicroBatch", "Plan", "Prompt", "PromptStream"]
