"""Opens a draft model on its device."""

from __future__ import annotations

from backends.base import BLOCK_SIZE, StageBackend
from hetero.draft_model import DraftModel
from hetero.kv.manager import KVManager
from hetero.pipeline.opening import StageOpener, attended_in_place, stage_spec
from hetero.pipeline.runner import Runner
from hetero.plan.draft import DraftPlan


def open_draft(draft: DraftPlan) -> tuple[DraftModel, StageBackend]:
    """The model with its weights, not yet run, and its stage. Raises what opening a device raises."""
    plan, settings = draft.planned.plan, draft.settings
    tokens = settings.max_num_batched_tokens
    rows = min(tokens, settings.max_num_seqs)
    spec = stage_spec(
        plan.groups,
        draft.stage.layers,
        tokens,
        rows,
        max_context=plan.max_model_len,
        types=draft.stage.kv_types,
    )
    opener = StageOpener(draft.model.path, draft.gguf, draft.config, settings.isolate)
    stage = opener.keep_open(draft.choice, spec)
    kv = KVManager(plan.groups, BLOCK_SIZE, attended_in_place([draft.choice]))
    return DraftModel(Runner([stage]), kv, tokens, rows, plan.max_model_len), stage
