"""What `hf:owner/repo[:which]` means: which of a repository's models, and where it lies once it is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.model_folder import ModelError, is_safe_name, models_in
from quant.split import parse_part_name

# Taken when a repository has several models and none is asked for: small, and still close to the original.
PREFERRED = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "MXFP4", "Q4_K_S", "Q4_0", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class HubName:
    """`hf:owner/repo[:which]` taken apart. `which` is a part of a file's name, such as Q5_K_M; "" for any."""

    owner: str
    repo: str
    which: str

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    @property
    def folder(self) -> str:
        """The name of the repository's folder in the model folder."""
        return f"{self.owner}--{self.repo}"

    def __str__(self) -> str:
        return f"hf:{self.repo_id}" + (f":{self.which}" if self.which else "")


def parse_hub_name(model: str) -> HubName:
    """Raises ModelError for what is not `hf:owner/repo[:which]`."""
    found = re.fullmatch(r"hf:([\w.-]+)/([\w.-]+)(?::([\w.+-]+))?", model, re.ASCII)
    if found is None or not all(is_safe_name(part) for part in found.groups("x")):
        raise ModelError(f"{model[:200]!r}: must be hf:owner/repo or hf:owner/repo:QUANT, such as Q5_K_M")
    return HubName(found[1], found[2], found[3] or "")


def find_local(name: HubName, folder: Path) -> Path | None:
    """The file (of a split model the first) that was downloaded for `name` before; None if none is whole."""
    here = folder / name.folder
    models = {model: files for model, files in models_in(here).items() if _is_whole(files)}
    chosen = choose(name.which, list(models))
    return models[chosen[0]][0] if len(chosen) == 1 else None


def choose(which: str, models: Sequence[str]) -> list[str]:
    """The models meant by `which`: one, or several (or none) that leave the choice to the user.

    `which` is a model's name, or a piece of it between separators, in any case; pieces at the end, and names
    without "UD" before them, come first. "" is the only model, or the one of PREFERRED.
    """
    if not which:
        if len(models) <= 1:
            return list(models)
        preferred = [choose(quant, models) for quant in PREFERRED]
        return next((one for one in preferred if len(one) == 1), list(models))
    wanted = which.lower().removesuffix(".gguf")
    for model in models:
        if model.lower() == wanted:
            return [model]
    piece = re.compile(rf"(?:^|[-_.]){re.escape(wanted)}(?:[-_.]|$)")
    found = [model for model in models if piece.search(model.lower())]
    last = [
        model for model in found if re.search(rf"(?:^|[-_.]){re.escape(wanted)}$", model.lower())
    ] or found
    return [model for model in last if f"ud-{wanted}" not in model.lower()] or last


def _is_whole(files: Sequence[Path]) -> bool:
    part = parse_part_name(files[0].name)
    return part is None or len(files) == part.parts
